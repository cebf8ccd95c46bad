"""Tables as Markdown."""

import re
from collections.abc import Iterable, Sequence
from textwrap import fill

WIDTH = 118  # characters in a line of text


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Format a table, one line per row. The first `left` columns are aligned left, all others right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def paragraph(*sentences: str) -> str:
    """Format sentences as a paragraph, with lines of `WIDTH` characters. Empty ones are left out.

    Inline code stays on one line, which may be longer.
    """
    text = " ".join(sentence for sentence in sentences if sentence)
    text = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ") + "\n"


def number(value: float | None, form: str) -> str:
    """Format a number; a missing one is a dash."""
    return "–" if value is None else format(value, form)


def joined(values: Iterable[float | None], form: str) -> str:
    """Format numbers that belong together."""
    return " · ".join(number(value, form) for value in values)


def difference(value: float | None) -> str:
    """Format a relative difference as a signed percentage; one that rounds to zero has no sign."""
    shown = number(value, "+.2%")
    return "0.00%" if shown in ("+0.00%", "-0.00%") else shown


def escape(text: str | None) -> str:
    """Make text safe inside a table: put it on one line and escape its bars."""
    return " ".join((text or "").split()).replace("|", "\\|")
