"""For all tests: which run and in how many processes, few threads, files in temporary folders only."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported; tensors here are tiny

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_train.output import show_messages
from tests.support.interpreting import interpret

if os.environ.get("TRITON_INTERPRET") == "1":
    interpret()

if hasattr(signal, "SIGHUP"):  # under nohup it is ignored, here and in every run that a test starts
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

show_messages()  # pytest has handlers on the root logger, which would silence them

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "RANK", "GROUP_RANK")


left_out = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked slow: fuzz, compilation, whole runs")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over the cores. Named tests, and tests on a GPU, run one after the other."""
    if hasattr(config, "workerinput"):  # this is one of the processes
        return
    options = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not options.markexpr
    if getattr(options, "numprocesses", 0) is not None or options.usepdb or options.collectonly:
        return
    if whole and not torch.cuda.is_available():
        options.numprocesses, options.dist = "logical", "worksteal"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.option.all or config.option.markexpr or any("::" in argument for argument in config.args)
    if not chosen:
        slow = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=slow)
        config.stash[left_out] = len(slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(left_out, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process of pytest-xdist leaves out the same tests."""
    node.config.stash[left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash.get(left_out, 0):
        terminalreporter.write_line(f"left out {config.stash[left_out]} slow tests; `pytest --all` runs them, too")


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """Remove the process group and the variables that Lightning sets for its ranks."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any W&B account, and keep the files of W&B and `datasets` in the test's own folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    # WANDB_DIR stays unset: it would move a run's own files
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures of runs in this process empty, as drawing takes most of a tiny run's time.

    A test marked `pictures` has them drawn, and so have runs in processes of their own.
    """
    if request.node.get_closest_marker("pictures") or "flash_train.training" not in sys.modules:
        return

    def save_figure(figure: Any, path: Any, **_: Any) -> Path:
        Path(path).touch()
        return Path(path)

    monkeypatch.setattr("flash_train.records.plots.save_figure", save_figure)


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restore what a test changed. A command that a signal stops ignores all further ones, as its process ends soon."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
