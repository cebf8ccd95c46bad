"""Whole runs through the console script: the files, the output, several runs, the kernels in the interpreter."""

import gc
import sys
import time
import weakref

import pytest
import torch
import yaml

from flash_train.cli.components.module import build_module
from tests.support.cli.runs import losses_of, run, start, summary_of

FILES = {"config.yaml", "metrics.csv", "summary.json", "loss.png", "throughput.png", "memory.png", "checkpoints"}
SUMMARY = {
    *("status", "seq_len", "model", "parameters", "attention", "device", "precision", "steps", "train_loss"),
    *("val_loss", "tokens_per_second", "mfu", "peak_memory_gib", "run_dir", "wandb_dir"),
}


@pytest.mark.slow
def test_all_files_with_the_default_logger(tiny, tmp_path):
    overrides = [text for text in tiny if not text.startswith(("logger", "run_dir"))]
    out = run(*overrides, cwd=tmp_path)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run_dir.iterdir()} == FILES | {"wandb"}
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-000003.ckpt"]

    summary = summary_of(run_dir)
    assert summary.keys() >= SUMMARY
    assert (summary["status"], summary["steps"], summary["seq_len"], summary["mfu"]) == ("finished", 3, 64, None)
    assert summary["attention"] == "sdpa" and summary["data"]["corpus"] == "text"
    assert list(losses_of(run_dir)) == ["1", "2", "3"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["run_dir"] == f"runs/{run_dir.name}"

    assert "attention: sdpa (flash cannot run: there is no NVIDIA GPU" in out or torch.cuda.is_available()
    assert f"wandb sync runs/{run_dir.name}/wandb/offline-run-*" in out
    assert list((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    assert (tmp_path / summary["wandb_dir"]).resolve().parent == (run_dir / "wandb").resolve()
    assert "run finished" in out and "sample" in out and f"runs/{run_dir.name}: config.yaml" in out
    tokens = summary["val_tokens"]
    assert 64 < tokens <= 128 and f"validation: on {tokens} tokens of " in out and " in 2 rows\n" in out
    assert f"on {tokens} tokens" in out.partition("run finished")[2]


@pytest.mark.slow
def test_every_seq_len_validates_on_the_same_tokens(in_process, tiny, tmp_path):
    tiny = [text for text in tiny if not text.startswith(("run_dir", "seq_len", "data.val_batches"))]
    tiny += ["data.val_fraction=0.5"]
    for seq_len in (32, 96):
        folder = tmp_path / str(seq_len)
        out = in_process(*tiny, f"run_dir={folder}", f"seq_len={seq_len}", "data.val_tokens=500", "max_steps=1")
        assert "validation: on 500 tokens of " in out and summary_of(folder)["val_tokens"] == 500
    batches = in_process(*tiny, f"run_dir={tmp_path / 'b'}", "seq_len=32", "data.val_batches=20", "data.val_tokens=2")
    assert ", in 40 rows\n" in batches  # 20 batches of two rows; val_batches wins over val_tokens


@pytest.mark.slow
def test_the_sample_has_as_many_tokens_as_asked_for(in_process, tiny, tmp_path, monkeypatch):
    asked = []

    def generate(model, tokens, *, max_new_tokens, max_seconds, **options):
        asked.append((max_new_tokens, max_seconds))
        return [ord("x")] * max_new_tokens

    monkeypatch.setattr("flash_train.cli.components.trainer.generate", generate)
    tiny = [text for text in tiny if not text.startswith("run_dir")]
    assert "─ sample ─" not in in_process(*tiny, f"run_dir={tmp_path / 'none'}", "callbacks.sample.tokens=0")
    for number, option in enumerate(("callbacks.sample.tokens=7", "callbacks.sample.seconds=null")):
        assert "─ sample ─" in in_process(*tiny, f"run_dir={tmp_path / str(number)}", option)
    assert asked == [(7, 1.0), (160, None)]


@pytest.mark.slow
def test_characters_that_the_terminal_lacks_fail_no_run(tiny, tmp_path):
    out = run(*tiny, cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert summary_of(tmp_path / "run")["status"] == "finished"
    assert out.isascii() and "run finished" in out


@pytest.mark.slow
def test_runs_of_the_same_second_get_different_folders(tiny, tmp_path):
    tiny = [text for text in tiny if not text.startswith("run_dir")]
    taken = {tmp_path / "runs" / time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(time.time() + i)) for i in range(90)}
    for folder in taken:
        (folder / "of another run").mkdir(parents=True)
    run(*tiny, cwd=tmp_path)
    (run_dir,) = set((tmp_path / "runs").iterdir()) - taken
    assert run_dir.name.endswith("_2") and (run_dir / "summary.json").is_file()
    assert all([path.name for path in folder.iterdir()] == ["of another run"] for folder in taken)


@pytest.mark.slow
def test_a_folder_that_another_run_writes_to_is_refused(tiny, tmp_path):
    """The second run begins there, or resumes the run that is still going."""
    process = start(*tiny, "max_steps=1000000", "trainer.checkpoint_every=1", cwd=tmp_path)
    folder = tmp_path / "run"
    deadline = time.monotonic() + 120
    while not any(folder.glob("checkpoints/step-00001*.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    for resume in ([], ["resume=last"]):
        second = start(*tiny, "max_steps=1000000", *resume, cwd=tmp_path)
        _, err = second.communicate(timeout=120)
        assert second.returncode == 1 and len(err.splitlines()) == 1, err
        assert f"run_dir={folder}: another run is writing there (process {process.pid} on " in err
    process.kill()  # its lock must end with it
    process.communicate()
    run(*tiny, "max_steps=1000000", "stop_after=1", "resume=last", cwd=tmp_path)
    assert not (folder / ".lock").exists()


@pytest.mark.slow
def test_a_run_is_freed_before_the_next(in_process, tiny, monkeypatch):
    """Trainer, module and optimizer refer to each other, so without the garbage collector every model would stay."""
    built, alive = [], []

    def count(*arguments):
        alive.append(sum(module() is not None for module in built))
        module = build_module(*arguments)
        built.append(weakref.ref(module))
        return module

    monkeypatch.setattr("flash_train.cli.components.module.build_module", count)
    enabled = gc.isenabled()
    gc.disable()  # a collection by chance would hide the leak
    try:
        in_process("-m", *tiny, "seed=0,1,2", "max_steps=1")
    finally:
        if enabled:
            gc.enable()
    assert alive == [0, 0, 0]


@pytest.mark.slow
def test_several_runs(in_process, tiny, tmp_path):
    in_process("-m", *tiny, "seed=0,1", "logger=wandb")
    first, second = (tmp_path / "run" / name for name in ("0", "1"))
    assert {path.name for path in first.iterdir()} >= FILES
    assert losses_of(first) != losses_of(second)
    ids = [(folder / "wandb" / "run_id").read_text() for folder in (first, second)]
    assert ids[0] != ids[1]
    for folder, seed in ((first, 0), (second, 1)):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["seed"], config["run_dir"]) == (seed, str(folder))


def test_cfg_prints_the_configuration_and_runs_nothing(in_process, tiny, tmp_path):
    shown = yaml.safe_load(in_process("--cfg", "job", *tiny, "seed=5"))
    assert (shown["seed"], shown["seq_len"], shown["model"]["width"]) == (5, 64, 16)
    assert not (tmp_path / "run").exists()


def test_recall_prints_the_chance_level(in_process, tiny, tmp_path):
    overrides = [text for text in tiny if not text.startswith("data")]
    out = in_process(*overrides, "data=recall", "data.n_pairs=4", "data.n_keys=8", "data.n_values=8", "data.val_rows=4")
    assert summary_of(tmp_path / "run")["chance_level"] == 1 / 8
    assert "chance level" in out and "answer accuracy" in out and "sample" not in out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_two_steps_of_the_kernels_under_the_interpreter(tiny, tmp_path):
    tiny = [*tiny, "seq_len=32", "batch_size=1", "max_steps=2", "trainer.progress_bar=false"]
    run(*tiny, "attention=flash", cwd=tmp_path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert summary_of(tmp_path / "run")["attention"] == "flash"
    assert len(losses_of(tmp_path / "run")) == 2

    run(*tiny, "attention=standard", f"run_dir={tmp_path / 'standard'}", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    ours, theirs = (losses_of(tmp_path / name).values() for name in ("run", "standard"))
    assert [float(x) for x in ours] == pytest.approx([float(x) for x in theirs], rel=1e-5)
