"""The check of words: what it reads, and what it does not."""

from collections import Counter

import pytest

from scripts.check_words import found_in, prose


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a part OF\nWHICH is read", ["of which"]),
        ('`told` is code, "those of" a quotation, {told} a value, untold and told_by other words', []),
        ("one goes on, one writes anew", ["goes on", "anew"]),
    ],
)
def test_words_and_phrases_are_found_outside_code_and_quotations(text, words):
    assert [word for _, word in found_in(text)] == words


def test_only_comments_and_strings_of_python_are_read(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        '"""Told."""\n\ntold = beside(1)  # this is a part of\n# which nobody speaks\n'
        'x = (\n    "that "\n    f"of {told}"\n)\n',
        encoding="utf-8",
    )
    found = [(line + before, word) for line, piece in prose(file) for before, word in found_in(piece)]
    assert Counter(word for _, word in found) == {"told": 1, "of which": 1, "that of": 1}
    assert (1, "told") in found and (3, "of which") in found
