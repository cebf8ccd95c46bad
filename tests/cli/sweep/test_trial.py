"""One trial in its own process: its exit status, its record, and no process that outlives the parent."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flash_train.cli.config.errors import UsageError
from flash_train.cli.sweep import trial as module
from flash_train.cli.sweep.trial import Result, Trial, keep, known_result, last_error, run_trial, run_trials

FINISHED = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[-1].removeprefix("run_dir=").strip("'"))
(folder / "summary.json").write_text(json.dumps({"status": "finished", "step_seconds": 0.5}))
"""


@pytest.fixture
def command(monkeypatch):
    """Let every trial run this Python text in place of `flash-train`."""

    def use(text: str) -> None:
        monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", text))

    return use


def test_finished_run_has_a_result(command, tmp_path):
    command(FINISHED + "print(sys.argv[1:])")
    trial = Trial(tmp_path / "seq_len=8,attention=sdpa", ("seq_len=8",))
    result = run_trial(trial)
    assert (result.status, result.reason, result.summary["step_seconds"]) == ("ok", None, 0.5)
    assert result.seconds > 0
    assert "seq_len=8" in (trial.folder / "log.txt").read_text()
    assert known_result(trial) == result
    assert {path.name for path in trial.folder.iterdir()} == {"cell.json", "log.txt", "summary.json"}


ENDS = [
    ("sys.exit('flash-train: seq_len=1: must be 2 or more')", "failed", "seq_len=1: must be 2 or more"),
    ("print('flash-train: no GPU', file=sys.stderr); sys.exit(3)", "unavailable", "no GPU"),
    ("print('flash-train: out of GPU memory'); sys.exit(4)", "oom", "out of GPU memory"),
    ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
    ("raise MemoryError", "oom", "MemoryError"),
    ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')", "oom", "RuntimeError: DefaultCPUAllocator"),
    ("print('before'); os.abort()", "failed", "SIGABRT: before"),
    ("print('  what():  std::bad_alloc', flush=True); os.abort()", "oom", "what():  std::bad_alloc"),
    ("print('ValueError: no', flush=True); os.kill(os.getpid(), 9)", "failed", "SIGKILL: ValueError: no"),
    ("sys.exit(0)", "failed", "the run was None"),
    ("sys.exit(7)", "failed", "exit status 7"),
]


@pytest.mark.parametrize(("text", "status", "reason"), ENDS, ids=[end[0][:40] for end in ENDS])
def test_exit_status_of_a_run_gives_its_result(command, tmp_path, monkeypatch, text, status, reason):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command(f"import os, sys\n{text}")
    result = run_trial(Trial(tmp_path / "cell", ()))
    assert result.status == status
    assert result.reason.startswith(reason)


@pytest.mark.parametrize(("before", "after", "status"), [(3, 4, "oom"), (3, 3, "failed"), (None, None, "oom")])
def test_kill_by_the_memory_limit_differs_from_other_kills(command, monkeypatch, tmp_path, before, after, status):
    counts = iter([before, after])
    monkeypatch.setattr(module, "_kills_for_memory", lambda: next(counts))
    command("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run_trial(Trial(tmp_path / "cell", ())).status == status


@pytest.mark.parametrize("line", ["flash-train: out of GPU memory at n=8", "[rank1]: MemoryError: out of GPU memory"])
def test_first_rank_killed_after_another_ran_out_of_memory(command, monkeypatch, tmp_path, line):
    monkeypatch.setattr(module, "_kills_for_memory", lambda: 3)
    later = "[rank2]: torch.distributed.DistBackendError: remote process exited"
    command(f"import os\nprint({line!r}, {later!r}, sep='\\n', flush=True)\nos.kill(os.getpid(), 9)")
    result = run_trial(Trial(tmp_path / "cell", ()))
    assert (result.status, result.reason) == ("oom", line.removeprefix("flash-train: "))


def test_result_is_reused_only_for_the_same_command(tmp_path):
    trial = Trial(tmp_path / "cell", ("seq_len=8", "logger.group=a"))
    assert known_result(trial) is None
    keep(trial, Result("oom", "out of memory"))
    for same in (trial.overrides, ("seq_len=4", "logger.group=b", "seq_len=8")):  # the last wins; a name is no setting
        assert known_result(Trial(trial.folder, same)) == Result("oom", "out of memory")
    with pytest.raises(UsageError, match=r"seq_len: 8, now 16; seed: not given, now 1\); allowed: .* another run_dir"):
        known_result(Trial(trial.folder, ("seq_len=16", "seed=1")))


MADE_BY = {"device": "NVIDIA H100", "torch": "2.11", "commit": "abc"}


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"device": "NVIDIA H200"}, "device: NVIDIA H100, now NVIDIA H200"),
        ({"torch": "2.12"}, "torch: 2.11, now 2.12"),
        ({"commit": "def"}, "commit: abc, now def"),
        ({"commit": "def-dirty"}, "commit: abc, now def-dirty"),
        ({"commit": "abc-dirty"}, None),
        ({"commit": None}, None),
    ],
)
def test_result_is_reused_only_for_the_same_device_and_versions(tmp_path, monkeypatch, now, says):
    trial = Trial(tmp_path / "cell", ())
    monkeypatch.setattr(module, "_versions", lambda: MADE_BY)
    keep(trial, Result("ok"))
    keep(other := Trial(tmp_path / "other", ()), Result("unavailable", "no GPU"))
    monkeypatch.setattr(module, "_versions", lambda: MADE_BY | now)
    if says is None:
        assert known_result(trial) == Result("ok")
        return
    with pytest.raises(UsageError, match=says):
        known_result(trial)
    assert known_result(other) is None  # nothing was measured there


def test_a_record_names_device_and_commit(tmp_path):
    keep(trial := Trial(tmp_path / "cell", ()), Result("ok"))
    made_by = json.loads((trial.folder / "cell.json").read_text())["versions"]
    assert made_by["device"] and made_by["torch"] and "commit" in made_by


def test_failed_trial_is_run_again(tmp_path):
    trial = Trial(tmp_path / "cell", ())
    keep(trial, Result("failed", "somebody pulled the plug"))
    assert known_result(trial) is None


def test_files_of_an_unfinished_run_are_removed(command, tmp_path):
    trial = Trial(tmp_path / "cell", ())
    trial.folder.mkdir()
    (trial.folder / "metrics.csv").write_text("step\n1\n")
    command(FINISHED)
    run_trial(trial)
    assert not (trial.folder / "metrics.csv").exists()


def test_parallel_trials_have_their_own_gpus(command, tmp_path):
    # Each waits until all four are there.
    command(
        FINISHED + f"import os, time; room = pathlib.Path({str(tmp_path)!r})\n"
        "(room / f'{os.getpid()}.here').touch()\n"
        "while len(list(room.glob('*.here'))) < 4: time.sleep(0.05)\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    wanted = [Trial(tmp_path / str(i), ()) for i in range(4)]
    done = dict(run_trials(wanted, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "1", "2", "3")]))
    assert all(done[trial].status == "ok" for trial in wanted)
    assert sorted((trial.folder / "log.txt").read_text().strip() for trial in wanted) == ["0", "1", "2", "3"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("ignores", [False, True])
def test_no_process_is_left_when_the_sweep_stops(command, monkeypatch, tmp_path, ignores):
    monkeypatch.setattr(module, "STOP_SECONDS", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if ignores else ""
    command(
        "import os, pathlib, signal, sys, time\n"
        f"{deaf}\n"
        f"(pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch()\n"
        "if sys.argv[1] == 'short': sys.exit(3)\n"
        "time.sleep(60)\n"
    )
    running = run_trials([Trial(tmp_path / "a", ("long",)), Trial(tmp_path / "b", ("short",))], [{}, {}])
    ended, _ = next(running)
    assert ended.name == "b"
    while len(list(tmp_path.glob("*.pid"))) < 2:
        time.sleep(0.05)
    running.close()
    assert not any(alive(int(path.stem)) for path in tmp_path.glob("*.pid"))
    assert not (tmp_path / "a" / "cell.json").exists()
    assert json.loads((tmp_path / "b" / "cell.json").read_text())["result"]["status"] == "unavailable"


def test_a_process_ends_with_its_parent():
    text = "from flash_train.cli.sweep.trial import end_with_parent; end_with_parent(); print(1, flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", text + "import time; time.sleep(60)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"1\n"
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(timeout=120) == -signal.SIGKILL
    process.stdout.close()


def test_the_last_error_of_a_log():
    traceback = "Traceback (most recent call last):\n  File x\nValueError: no\n\nsome warning\n"
    assert last_error(traceback) == "ValueError: no"
    assert last_error("torch.cuda.OutOfMemoryError: CUDA out of memory\n") == (
        "torch.cuda.OutOfMemoryError: CUDA out of memory"
    )
    assert last_error("a\nb\n") == "b"
    assert last_error("\n") is None


def test_run_stopped_by_a_signal_has_no_result(tmp_path):
    """Its exit status is the signal, and its record says that the run has not ended."""
    child = module._Child.__new__(module._Child)
    child.trial = Trial(tmp_path, ())
    assert child._judge(128 + signal.SIGTERM, "interrupted") == ("failed", "the run was interrupted")
