"""Griffe extension: comments above an attribute or a field become its docstring."""

from typing import Any

from griffe import Attribute, Docstring, Extension


class AttributeComments(Extension):
    """Extension that turns the comment lines directly above an attribute into its docstring."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Set the docstring of an attribute to the comment above it, unless it has a docstring."""
        if attr.docstring is not None or attr.lineno is None or not attr.parent:
            return
        lines = attr.lines_collection[attr.filepath][: attr.lineno - 1]
        comments: list[str] = []
        while lines and lines[-1].strip().startswith("#"):
            comments.insert(0, lines.pop().strip().lstrip("#:").strip())
        if comments:
            attr.docstring = Docstring("\n".join(comments), parent=attr)
