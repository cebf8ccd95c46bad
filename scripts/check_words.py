"""Finds words and phrases that make the text hard to read, and fails if there are any.

Read are comments and strings of Python files, and all text of Markdown, YAML, TOML and shell files. Code identifiers,
`inline code` and "quotations" do not count.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS = (
    "told", "whom", "of which", "beside", "that of", "those of", "in words", "goes on", "anew", "save for",
    "rehearsal", "waits for the host", "sum of dq",
)  # fmt: skip

SKIPPED = ("scripts/check_words.py", "tests/test_words.py")  # they list the words
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".sh")
NAMES = ("Makefile", ".ci/run")
NOT_PROSE = re.compile(r'```\w*|`[^`\n]*`|"[^"\n]{0,80}"|“[^”]*”|\{[^{}]*\}')


def files() -> Iterator[Path]:
    """The tracked and new files that are read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in sorted(set(listed)):
        path = ROOT / name
        if name not in SKIPPED and (path.suffix in SUFFIXES or name in NAMES) and path.is_file():
            yield path


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The pieces of a file that are read, each with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    return _of_python(text) if path.suffix == ".py" else iter([(1, text)])


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings; those that follow one another are one piece, so that a phrase may span lines."""
    kind, first, parts = None, 0, []
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    in_f_string = {getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END")}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped | in_f_string:
            continue
        now = "comment" if token.type == tokenize.COMMENT else None
        if token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)):
            now = "string"
        if now != kind or now is None:
            if parts:
                yield first, ("\n" if kind == "comment" else "").join(parts)
            kind, first, parts = now, token.start[0], []
        if now == "comment":
            parts.append(token.string.lstrip("#: "))
        elif now == "string":
            parts.append(re.sub(r"""^[a-zA-Z]{0,2}("{3}|'{3}|"|')|("{3}|'{3}|"|')$""", "", token.string))


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """The words that a text has, each with how many lines precede it in the text."""
    text = NOT_PROSE.sub(lambda match: "\0" + "\n" * match[0].count("\n"), text)
    for word in WORDS:
        spaced = word.replace(" ", r"\s+")
        pattern = rf"(?<![\w.-]){spaced}(?![\w-])"
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()), word


def main() -> int:
    """Print every place of a word; exit status 1 if there is one."""
    places = [
        f"{path.relative_to(ROOT)}:{line + before}: {word!r}"
        for path in files()
        for line, piece in prose(path)
        for before, word in found_in(piece)
    ]
    print(*places, sep="\n", end="\n" if places else "")
    return int(bool(places))


if __name__ == "__main__":
    sys.exit(main())
