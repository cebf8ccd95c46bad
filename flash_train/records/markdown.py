"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Format a table, one line per row. The first `left` columns are aligned left, all others right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def number(value: float | None, form: str) -> str:
    """Format a number; a missing one is a dash."""
    return "–" if value is None else format(value, form)


def joined(values: Iterable[float | None], form: str) -> str:
    """Format numbers that belong together."""
    return " · ".join(number(value, form) for value in values)


def escape(text: str | None) -> str:
    """Make text safe inside a table: put it on one line and escape its bars."""
    return " ".join((text or "").split()).replace("|", "\\|")
