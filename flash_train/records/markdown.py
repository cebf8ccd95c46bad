"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Lines, each ended; all columns but the first `left` are flushed right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))
