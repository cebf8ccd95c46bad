"""The pages of the documentation, as their fenced code blocks.

A block that cannot run has a comment above it that says why: ``<!-- not run: it needs a GPU -->``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S
)
FILE_LINE = re.compile(r"^(?:#|//) ([\w./-]+\.\w+)$")


@dataclass(frozen=True)
class Block:
    """One fenced block: `reason` says why it does not run, `section` is the heading above it."""

    page: Path
    section: str
    language: str
    code: str
    reason: str | None = None

    @property
    def file(self) -> str | None:
        """The file that the block is, or changes, where its first line names one: ``# conf/model/30m.yaml``."""
        match = FILE_LINE.match(self.code.partition("\n")[0])
        return match[1] if match else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    headings = [(match.start(), match[1]) for match in re.finditer(r"^#+ (.+)$", _without_code(text), re.M)]
    found = []
    for match in FENCE.finditer(text):
        section = next((title for start, title in reversed(headings) if start < match.start()), "")
        found.append(Block(page, section, match["language"], match["code"], match["reason"]))
    return found


def _without_code(text: str) -> str:
    """The page with blanks in place of its blocks, whose comments look like headings."""
    return FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def anchors_of(page: Path) -> set[str]:
    """The names by which a link reaches a heading, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _without_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def marked(name: str, text: str = "") -> str:
    """Return a page with the marks of a table. `text` is the table between them."""
    return f"before\n<!-- results:{name} -->\n{text}<!-- /results:{name} -->\nafter\n"
