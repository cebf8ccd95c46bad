"""Which tests a call of pytest runs, and in how many processes."""

from types import SimpleNamespace

import pytest
import torch

from tests import conftest

WHOLE, NAMED = pytest.Config.ArgsSource.TESTPATHS, pytest.Config.ArgsSource.ARGS


def config_of(source=WHOLE, **changes):
    options = {"numprocesses": None, "dist": "no", "usepdb": False, "collectonly": False, "markexpr": "", "all": False}
    return SimpleNamespace(args_source=source, args=["tests"], option=SimpleNamespace(**options | changes))


def processes(config):
    conftest.pytest_cmdline_main(config)
    return config.option.numprocesses


def test_the_whole_suite_runs_on_all_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = config_of()
    assert processes(config) == "logical" and config.option.dist == "worksteal"


@pytest.mark.parametrize(
    "options", [{"source": NAMED}, {"markexpr": "gpu"}, {"usepdb": True}, {"collectonly": True}], ids=str
)
def test_a_part_of_the_suite_runs_in_one_process(options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert processes(config_of(**options)) is None


def test_a_given_number_of_processes_is_kept():
    assert processes(config_of(numprocesses=3)) == 3


def test_tests_on_a_gpu_run_in_one_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert processes(config_of()) is None


def test_a_process_of_the_suite_starts_no_others(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = config_of()
    config.workerinput = {}
    assert processes(config) is None


@pytest.mark.parametrize(
    "changes, slow_runs",
    [({}, False), ({"all": True}, True), ({"markexpr": "gpu"}, True), ({"args": ["tests/x.py::test_y"]}, True)],
    ids=str,
)
def test_slow_tests_run_if_they_are_asked_for(changes, slow_runs):
    args = changes.pop("args", ["tests"])
    config = config_of(**changes)
    config.args, config.stash, deselected = args, pytest.Stash(), []
    config.hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    slow, quick = (SimpleNamespace(keywords={name: True}) for name in ("slow", "quick"))
    items = [slow, quick]
    conftest.pytest_collection_modifyitems(config, items)
    assert (items, deselected) == (([slow, quick], []) if slow_runs else ([quick], [slow]))
