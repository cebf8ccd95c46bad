"""Mutated command lines: each begins its run, or ends in one line that names the key."""

import importlib
import io
import logging
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hydra.core.global_hydra import GlobalHydra

from flash_train.cli import ablate, bench_memory, bench_start
from flash_train.cli.config.choices import groups
from flash_train.cli.run import build
from flash_train.cli.sweep import find_max
from tests.support.cli.command_lines import Line, mutated_lines

PER_TEST = 40
KEY = re.compile(r"\w+(\.\w+)*=")
OK, MISTAKE, UNAVAILABLE, NO_MEMORY = 0, 1, 3, 4


class Begun(BaseException):
    """Everything is checked and built: from here on a run would train. No `except Exception` takes it for an error."""


@pytest.fixture
def nothing_begins(monkeypatch, tmp_path):
    """A run, a trial or a measurement that would begin raises `Begun`; the standard library is a small one."""

    def begin(*arguments, **options):
        raise Begun

    monkeypatch.setattr(build, "build_logger", begin)  # the last that is built, as it writes to run_dir
    monkeypatch.setattr(find_max, "run_trial", begin)
    monkeypatch.setattr(ablate, "run_trials", begin)
    monkeypatch.setattr(bench_start, "first_step", begin)
    for name in ("measure_step", "measure_attention", "measure_traffic"):
        monkeypatch.setattr(bench_memory, name, begin)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"{number}.py").write_text("x = 1\n" * 50, encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **__: str(library))


def outcome(line: Line) -> tuple[int | None, list[str]]:
    """The exit status, None where the run would begin, and the lines on stderr."""
    name = line.command.split()[0].replace("find_max", "profile_memory")
    module = importlib.import_module(f"flash_train.cli.{name}")
    sys.argv = ["command", *line.arguments]  # the fixture of the test restores it
    status: int | None = OK
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = module.main() or OK
        except Begun:
            status = None
        except SystemExit as stop:
            status = stop.code or OK
        finally:
            GlobalHydra.instance().clear()
            logging.getLogger().handlers.clear()  # Hydra's, after --info
    return status, errors.getvalue().splitlines()


def names(line: Line, text: str) -> bool:
    """Return whether an error names the mutation: the key, group or flag; for another choice, any of its keys."""
    for mutated in line.mutated:
        whole = " ".join(mutated.split())
        key = whole.lstrip("+~").split("=")[0]
        group = key.rpartition(".")[0]
        if (
            (key or whole or repr(mutated)) in text
            or (group and f"{group}." in text)
            or (key in groups() and KEY.search(text))
        ):
            return True
    return False


def fault(line: Line) -> str | None:
    """Describe what is wrong with the outcome of a command line, or return None."""
    try:
        status, errors = outcome(line)
    except Exception as error:  # the fault that is looked for: its text stands in the test's report
        return f"{type(error).__name__}: {str(error)[:200]}"
    if status in (None, OK):
        return f"{status}, with errors: {errors}" if any(text.startswith("flash-train:") for text in errors) else None
    several = line.command == "train -m" and status in (UNAVAILABLE, NO_MEMORY)  # a line for each run, and the last one
    if status not in (MISTAKE, UNAVAILABLE, NO_MEMORY) or not all(text.startswith("flash-train: ") for text in errors):
        return f"{status}: {errors}"
    if len(errors) != 1 and not (several and len(errors) > 1):
        return f"{len(errors)} lines: {errors}"
    if status != UNAVAILABLE and not names(line, errors[0]) and not (status == NO_MEMORY and KEY.search(errors[0])):
        return f"names none of {line.mutated}: {errors}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_mutated_lines(nothing_begins, tiny, tmp_path, monkeypatch, seed):
    monkeypatch.setattr(sys, "argv", sys.argv)
    run_dir = tmp_path / "finished"
    run_dir.mkdir()
    (run_dir / "summary.json").write_text('{"status": "failed"}', encoding="utf-8")
    lines = mutated_lines(PER_TEST, seed, tiny, str(run_dir), str(tmp_path))
    faults = [f"{line.command} {line.arguments}: {what}" for line in lines if (what := fault(line))]
    assert not faults, "\n".join(faults)


def test_the_lines_are_the_same_each_time(tiny):
    first, second = (list(mutated_lines(30, 0, tiny, "run", "folder")) for _ in range(2))
    assert first == second


def test_a_line_without_mutations_begins(nothing_begins, tiny, monkeypatch):
    """Were this not so, all others would end well for the wrong reason."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    for command, more in (("train", ()), ("train -m", ("-m", "seed=0,1")), ("profile_memory", ())):
        assert outcome(Line(command, (*tiny, *more), ())) == (None, [])


def test_a_traceback_and_a_line_without_the_key_are_faults(nothing_begins, tiny, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    line = Line("train", (*tiny, "seq_len=abc"), ("seq_len",))
    assert fault(line) is None
    assert "names none of" in fault(Line("train", line.arguments, ("batch_size",)))
    monkeypatch.setattr("flash_train.cli.run.command.prepare", lambda _: 1 / 0)
    assert "ZeroDivisionError" in fault(line)
