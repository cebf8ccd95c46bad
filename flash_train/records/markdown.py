"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """One line per row, each with its line end. The first `left` columns are aligned left, all others right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def escape(text: str | None) -> str:
    """Text that cannot break a table: in one line, its bars escaped."""
    return " ".join((text or "").split()).replace("|", "\\|")
