"""`-m`: how the end of one run affects the runs after it and the exit status."""

import signal

import pytest
import torch
from lightning.pytorch import Trainer

from flash_train.cli.config.errors import OutOfMemoryError, UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.config.pages import OUT_OF_MEMORY
from flash_train.cli.launch.interrupt import Interrupted
from flash_train.cli.launch.multirun import Multirun, require_no_other_sweep, swept_values
from flash_train.cli.launch.run_table import EndedRun, run_table
from flash_train.training import CausalLMModule
from flash_train.training.callbacks import StopAfter


def own_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("flash-train: ")]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="hardware=cuda is there on a GPU")
@pytest.mark.parametrize("accelerators", ["cuda,cpu", "cpu,cuda"])
def test_a_run_that_cannot_run_here_is_reported_and_the_others_run(flash_train, tiny, tmp_path, accelerators):
    code, lines = flash_train("-m", *tiny, f"trainer.accelerator={accelerators}", "max_steps=1")
    number = accelerators.split(",").index("cuda")
    (line,) = own_lines(lines)
    assert code == 0 and line.startswith(f"flash-train: run {number} (trainer.accelerator=cuda): trainer.accelerator=")
    assert (tmp_path / "run" / str(1 - number) / "summary.json").is_file()
    assert not (tmp_path / "run" / str(number)).exists()


@pytest.mark.slow
def test_exit_status_is_3_if_no_run_can_run(flash_train, tiny):
    """Each run has its line, even where the reason is known before any run begins."""
    code, lines = flash_train("-m", *tiny, "precision=fp16-mixed", "seed=0,1")
    assert code == 3 and len(lines) == 3, lines
    assert lines[1].startswith("flash-train: run 1 (seed=1): precision=fp16-mixed: needs a GPU")
    assert lines[2] == "flash-train: no run ended ok (2 unavailable); the message of each says why"


@pytest.mark.slow
def test_each_run_has_its_own_wandb_run_even_if_a_variable_names_one(flash_train, tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "named")
    assert flash_train("-m", *tiny, "seed=0,1", "max_steps=1", "logger=wandb", "logger.mode=offline")[0] == 0
    ids = {(tmp_path / "run" / name / "wandb" / "run_id").read_text().strip() for name in "01"}
    assert len(ids) == 2 and "named" not in ids


@pytest.mark.slow
def test_exhausted_memory_ends_only_its_run(flash_train, tiny, monkeypatch, tmp_path):
    step = CausalLMModule.training_step

    def first_fails(module, *arguments):
        if not (tmp_path / "run" / "1").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return step(module, *arguments)

    monkeypatch.setattr(CausalLMModule, "training_step", first_fails)
    code, lines = flash_train("-m", *tiny, "seed=0,1", "max_steps=1", "logger=wandb")
    (line,) = own_lines(lines)
    assert code == 0 and line.startswith("flash-train: run 0 (seed=0): out of GPU memory")
    ids = [(tmp_path / "run" / name / "wandb" / "run_id").read_text() for name in "01"]
    assert ids[0] != ids[1]
    assert len(list((tmp_path / "run" / "1" / "wandb").glob("offline-run-*"))) == 1  # not in run 0, which failed


@pytest.mark.slow
def test_another_mistake_ends_the_sweep(flash_train, tiny, tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]  # without a model in them
    for folder in folders:
        folder.mkdir()
    code, lines = flash_train("-m", *tiny, f"init_from={','.join(map(str, folders))}")
    (line,) = own_lines(lines)
    assert code == 1 and f"run 0 (init_from={folders[0]}): init_from={folders[0]}: config.json is missing" in line
    assert line.endswith("; runs not begun: 2 of 3 (see docs/models.md#start-from-a-model)")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_ends_the_sweep(flash_train, tiny, tmp_path, monkeypatch, number, times):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def send(callback, trainer, module):
        for _ in range(times):
            signal.raise_signal(number)

    monkeypatch.setattr(StopAfter, "on_step_end", send)
    try:
        code, lines = flash_train("-m", *tiny, "seed=0,1,2", "max_steps=5")
    finally:
        signal.signal(signal.SIGINT, before[0])  # Lightning leaves a second Ctrl-C ignored
    assert code == 128 + number
    assert own_lines(lines) == [f"flash-train: stopped by {number.name}; runs not begun: 2 of 3"]
    assert not (tmp_path / "run" / "1").exists()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_before_a_run_has_steps(flash_train, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    code, lines = flash_train("-m", *tiny, "seed=0,1")
    assert (code, own_lines(lines)) == (130, ["flash-train: stopped by SIGINT; runs not begun: 1 of 2"])


def test_another_sweep_in_the_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["-m", "seed=0,1", "run_dir=sweep"]
    (tmp_path / "sweep").mkdir()
    require_no_other_sweep(read(given))  # the folder has none
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {overrides: {task: ['seed=0,1', run_dir=sweep]}}")
    require_no_other_sweep(read(["-m", "seed=0,1,2", "run_dir=sweep"]))  # it made no run, for example after a mistake
    (tmp_path / "sweep" / "0").mkdir()
    (tmp_path / "sweep" / "0" / "summary.json").touch()
    require_no_other_sweep(read(given))
    require_no_other_sweep(read([*given[:2], f"run_dir={tmp_path / 'sweep'}"]))
    require_no_other_sweep(read([*given, "seed=2,3", "resume=last"]))
    with pytest.raises(UsageError, match=r"run_dir=sweep: holds another sweep \(multirun.yaml\); allowed: another"):
        require_no_other_sweep(read(["-m", "seed=0,1,2", "run_dir=sweep"]))
    (tmp_path / "sweep" / "multirun.yaml").write_text("[")
    with pytest.raises(UsageError, match="run_dir=sweep: multirun.yaml cannot be read"):
        require_no_other_sweep(read(given))


def test_statuses(capsys):
    runs = Multirun(("a=1", "a=2"))
    with runs.next() as name:
        assert name == "run 0 (a=1)"
    with runs.next():
        raise OutOfMemoryError("out of memory")
    line = f"flash-train: run 1 (a=2): out of memory (see docs/{OUT_OF_MEMORY})\n"
    assert runs.statuses == ["ok", "oom"] and capsys.readouterr().err == line
    runs.end()
    runs.ended = [EndedRun("a=1", "oom"), EndedRun("a=2", "oom")]
    with pytest.raises(OutOfMemoryError, match="no run ended ok"):
        runs.end()


def test_runs_that_were_not_begun_are_counted():
    with (
        pytest.raises(UsageError, match=r"run 0 \(a=1\): wrong; runs not begun: 1 of 2"),
        Multirun(("a=1", "a=2")).next(),
    ):
        raise UsageError("wrong")
    with pytest.raises(SystemExit) as stop, Multirun(("a=1",)).next():
        raise Interrupted(signal.SIGTERM)
    assert stop.value.code == 143


def test_runs_are_named_by_their_swept_keys():
    line = read(["-m", "seed=0,1", "seq_len=64", "model=nano,125m"])
    assert swept_values(line, ("seed=1", "seq_len=64", "model=nano")) == "seed=1, model=nano"


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_of_its_runs(flash_train, tiny, capsys, monkeypatch):
    printed = []
    monkeypatch.setattr(
        "flash_train.cli.launch.multirun.run_table", lambda runs: printed.append(run_table(runs)) or printed[-1]
    )
    code, _ = flash_train("-m", *tiny, "max_steps=1", "seed=0,1", "trainer.progress_bar=false")
    assert code == 0
    head, *rows = printed[0].splitlines()
    assert head.split() == [
        "run",
        "swept",
        "status",
        "steps",
        "train",
        "loss",
        "val",
        "loss",
        "tokens/s",
        "peak",
        "GiB",
    ]
    assert [row.split()[:4] for row in rows] == [["0", "seed=0", "ok", "1"], ["1", "seed=1", "ok", "1"]]


def test_missing_values_are_dashes_in_the_table(tmp_path):
    (tmp_path / "summary.json").write_text('{"steps": 3, "train_loss": 1.25, "mfu": null}')
    table = run_table([EndedRun("seq_len=64", "ok", tmp_path), EndedRun("seq_len=128", "oom", tmp_path / "nowhere")])
    assert table.splitlines() == [
        "run  swept        status  steps  train loss",
        "0    seq_len=64   ok          3      1.2500",
        "1    seq_len=128  oom         -           -",
    ]
