"""An extension of griffe, which reads this project's code for the documentation site: comments describe names.

A constant or a field is described by the `#:` comment above it, or by the comment behind it.
"""

import re
from typing import Any

import griffe

BEHIND = re.compile(r"\s{2}#:? (.+)$")
ABOVE = "#: "


class Comments(griffe.Extension):
    """Takes the comments of names without a docstring as their docstrings."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and (words := comment_of(attr)):
            attr.docstring = griffe.Docstring(words, lineno=attr.lineno, parent=attr)


def comment_of(attr: griffe.Attribute) -> str:
    """The comment above a name or behind it, as a sentence; empty if there is none."""
    if attr.lineno is None:
        return ""
    lines = attr.lines_collection[attr.filepath]
    words: list[str] = []
    for line in reversed(lines[: attr.lineno - 1]):
        if not line.strip().startswith(ABOVE):
            break
        words.insert(0, line.strip().removeprefix(ABOVE))
    if not words and (behind := BEHIND.search(lines[(attr.endlineno or attr.lineno) - 1])):
        words = [behind[1]]
    text = " ".join(words)
    return text[:1].upper() + text[1:]
