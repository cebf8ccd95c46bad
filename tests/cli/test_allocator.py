import sys

import pytest

from flash_train.cli.allocator import VARIABLES, grow_segments


def test_segments_grow_unless_the_environment_says_how_it_shall_be(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    environ = {"HOME": "/home/me"}
    grow_segments(environ)
    assert environ == {"HOME": "/home/me", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in VARIABLES:
        chosen = {name: "max_split_size_mb:512"}
        grow_segments(chosen)
        assert chosen == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_they_cannot(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    environ = {}
    grow_segments(environ)
    assert not environ
