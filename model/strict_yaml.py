"""YAML as people write it: nothing that is said twice, or is not what it looks like, passes."""

from typing import Any

import yaml


def value_from_yaml(text: str | bytes) -> Any:
    """What a document of YAML holds; None if it is empty.

    Raises:
        yaml.YAMLError: it is no YAML, a key comes twice, or a number or date is none. The message
            names the place.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it holds lists too deep within lists") from None


class _Loader(yaml.SafeLoader):
    """Finds keys that come twice, and names the place of what is not of its type."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} comes twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What Python says of numbers, dates and tags.
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"no usable {kind}", problem_mark=node.start_mark
            ) from None
