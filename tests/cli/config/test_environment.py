"""Variables that a command sets before PyTorch is imported."""

import platform
import sys

import pytest

from flash_train.cli.config.environment import ALLOCATOR_VARIABLES, grow_segments, quieten_profiler


def test_expandable_segments_are_on_unless_a_variable_configures_the_allocator(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-generic")
    environ = {"HOME": "/home/me"}
    grow_segments(environ)
    assert environ == {"HOME": "/home/me", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR_VARIABLES:
        chosen = {name: "max_split_size_mb:512"}
        grow_segments(chosen)
        assert chosen == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("system", "release"), [("darwin", "24.0"), ("win32", "11"), ("linux", "5.15.167.4-microsoft-standard-WSL2")]
)
def test_other_systems_have_no_expandable_segments(system, release, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    environ = {}
    grow_segments(environ)
    assert not environ


def test_the_profiler_is_quiet_unless_a_variable_says_otherwise():
    environ = {"KINETO_LOG_LEVEL": "0"}
    quieten_profiler(environ)
    assert environ == {"KINETO_LOG_LEVEL": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
