"""For the API reference: the `#:` comment before an attribute as its docstring."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["AttributeComments"]


class AttributeComments(griffe.Extension):
    """An extension of griffe, which reads no such comments by itself."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Give an attribute that has no docstring the text of its comment."""
        if attr.docstring is not None or attr.lineno is None:
            return
        lines = attr.lines_collection[attr.filepath]  # type: ignore[index]
        comment: list[str] = []
        row = attr.lineno - 2
        while row >= 0 and lines[row].lstrip().startswith("#:"):
            comment.insert(0, lines[row].lstrip()[2:].strip())
            row -= 1
        if comment:
            attr.docstring = griffe.Docstring("\n".join(comment), lineno=row + 2, parent=attr)
