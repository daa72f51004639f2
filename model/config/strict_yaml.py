"""YAML parsing that rejects duplicate keys and malformed numbers or dates."""

from typing import Any

import yaml


def value_from_yaml(text: str | bytes) -> Any:
    """Parse a YAML document. Return None if the document is empty.

    Raises:
        yaml.YAMLError: the text is not YAML, is nested too deeply, has a duplicate key, or has a
            malformed number or date. In most cases, the message names line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("the document is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that reports duplicate keys and malformed scalars with their location."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # Parsers of numbers, dates and tags raise these errors without a location in the document.
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"invalid {kind}", problem_mark=node.start_mark
            ) from None
