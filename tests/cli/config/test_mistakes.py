"""A mistake ends with one line on stderr, which names the key, the value and what is allowed, and exit code 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_train.cli import train as command
from flash_train.cli.config.errors import UsageError, one_line_errors
from flash_train.model import ModelConfig, Transformer, save_pretrained
from flash_train.training import OptimizerConfig
from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]


# Arguments → words that the line must have. All are found before Lightning is imported.
AT_ONCE = [
    (["seq_len=abc"], ["seq_len=abc", "an integer"]),
    (["seq_len=1.5"], ["seq_len=1.5", "an integer"]),
    (["seq_len=-1"], ["seq_len=-1", "2 or more"]),
    (["seq_len=1"], ["seq_len=1", "2 or more"]),
    (["max_steps=0"], ["max_steps=0", "1 or more"]),
    (["compile=maybe"], ["compile=maybe", "true or false"]),
    (["precision=fp4"], ["precision=fp4", "fp32, bf16-mixed, bf16-true, fp16-mixed, fp8"]),
    (["precision_fp8.recipe=blockwise"], ["precision_fp8.recipe=blockwise", "tensorwise, rowwise"]),
    (["precision=bf16mixed"], ["did you mean bf16-mixed?"]),
    (["model=nope"], ["model=nope", "nano, pretrained"]),
    (["model=nanoo"], ["did you mean nano?"]),
    (["modle=nano"], ["modle", "did you mean model?"]),
    (["sequence_len=3"], ["sequence_len", "did you mean seq_len?"]),
    (["model.widht=3"], ["model.widht", "did you mean model.width?", "head_dim"]),
    (["+foo=3"], ["foo", "no such key"]),
    (["data=txt"], ["data=txt", "did you mean text?", "hub, recall, stdlib, text"]),
    (["data=text"], ["data.path"]),
    (["data=text", "data.path=nowhere"], ["data.path=nowhere", "no such file or folder"]),
    (["data=text", "data.path=[., no*.txt]"], ["data.path=no*.txt", "no glob that matches any"]),
    (["data.tokenizer=none.json"], ["data.tokenizer=none.json", "tokenizer.json", "bytes"]),
    (["init_from=nowhere"], ["init_from=nowhere", "config.json"]),
    (["data=hub"], ["data.name"]),
    (["data.path=x"], ["data.path", "data=text"]),
    (["data.packing=best"], ["data.packing=best", "best_fit, concat"]),
    (["data.val_fraction=1"], ["data.val_fraction=1", "must be in (0, 1)"]),
    *(
        ([f"attention.dropout={p}"], [f"attention.dropout={p}", "must be 0 or in (1/512, 511/512]", "steps of 1/256"])
        for p in ("1.5", "1", "-0.1", "0.0005", "0.9999")
    ),
    (["attention.backend=fast"], ["attention.backend=fast", "auto, chunked, flash, hopper, sdpa, standard, triton"]),
    (["attention=tritn"], ["did you mean triton?"]),
    (["trainer.strategy=fsdp"], ["trainer.strategy=fsdp", "auto, ddp"]),
    (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9]", "two numbers"]),
    *(([f"optimizer.betas={x}"], [f"optimizer.betas={x}: must be two numbers", "[0.9,0.95]"]) for x in ("0.9", "a")),
    (["parallel.check=true"], ["parallel.check=true: there is one device", "allowed: false"]),
    (["optimizer.lr=fast"], ["optimizer.lr=fast", "a number"]),
    (["optimizer=adam"], ["optimizer=adam", "adamw"]),
    (["experiment=nope"], ["experiment=nope", "recall"]),
    (
        ["optimizer.in_backward=true"],
        ["optimizer.in_backward=true: optimizer.gradient_clip=1.0 needs", "allowed: optimizer.gradient_clip=null"],
    ),
    (
        ["optimizer.in_backward=true", "optimizer.gradient_clip=0", "accumulate=2"],
        ["optimizer.in_backward=true: a step has 2 micro-batches", "allowed: accumulate=1"],
    ),
    (
        ["optimizer.in_backward=true", "optimizer.gradient_clip=null", "trainer.devices=2"],
        ["optimizer.in_backward=true: 2 devices exchange", "allowed: trainer.devices=1"],
    ),
    (["hardware=gpu"], ["hardware=gpu", "cuda"]),
    (["hardware=cpu", "precision=fp16-mixed"], ["precision=fp16-mixed", "fp32, bf16-mixed, bf16-true"]),
    (["hardware=cpu", "precision=fp8"], ["precision=fp8: needs a GPU", "fp32, bf16-mixed, bf16-true"]),
    (["model=pretrained"], ["model=pretrained", "init_from"]),
    (["resume=last"], ["resume=last", "run_dir"]),
    (["validate_only=true"], ["validate_only=true", "resume=CHECKPOINT or init_from=FOLDER"]),
    (["logger=csv"], ["logger=csv", "no such choice", "none, wandb"]),
    (["seq_len"], ["seq_len", "key=value"]),
    (["lr=1e-3"], ["lr: no such key", "did you mean optimizer.lr?"]),
    (["width=3"], ["width: no such key", "did you mean model.width?"]),
    (["optimizer.betas.name=1"], ["optimizer.betas.name: no such key; allowed: optimizer.betas=[…]"]),
    (["optimizer.betas.name.x=1"], ["optimizer.betas.name: no such key"]),
    (["name=x"], ["name: no such key", "model.name or logger.name"]),
    (["dropuot=0.1"], ["dropuot: no such key", "did you mean attention.dropout?"]),
    (["experiment=null"], ["experiment=null", "no such choice", "recall", "leave experiment= out"]),
    (["-m", "experiment=recall,null"], ["experiment=null", "leave experiment= out"]),
    (["max_steps=null"], ["max_steps=null: needs a value", "leave max_steps= out"]),
    (["-m", "seed=0,null"], ["seed=null: needs a value"]),
    (["data.tokenizer=."], ["data.tokenizer=.: is a folder", "tokenizer.json"]),
    (["logger=null"], ["logger=null", "no such choice", "none, wandb"]),
    (["hardware=null"], ["hardware=null", "no such choice", "auto, cpu"]),
    (["trainer=5"], ["trainer=5", "no such choice", "default"]),
    (["model=[nano]"], ["model=[nano]", "no such choice"]),
    (["data.corpus=hub"], ["data.corpus=hub", "allowed: data=hub"]),
    (["logger.name=wandb", "logger=none"], ["logger.name=wandb", "allowed: logger=wandb"]),
    (["data=text", "data.path=[[a],[b]]"], ["data.path=[['a'], ['b']]", "a list of these"]),
    ([f"seq_len={10**30}"], [f"seq_len={10**30}", "must be at most 2147483647"]),
    (["optimizer.lr=inf"], ["optimizer.lr=inf", "a finite number"]),
    (["optimizer.betas=[nan,0.9]"], ["optimizer.betas"]),
    (["seed=${nope}"], ["seed", "nope"]),
    (["-m", "seed=range(0)"], ["seed=range(0)", "has no values"]),
    (["optimizer.betas=${seed}"], ["optimizer.betas=${seed}", "int"]),
    (["-m", "seed=0,1", "optimizer.betas=${seed}"], ["optimizer.betas=${seed}", "int"]),
    (["++data.foo=3"], ["data.foo", "no such key"]),
    (["model.n_layers=1001"], ["model.n_layers=1001", "must be in [1, 1000]"]),
    (["-m", "--cfg", "job", "seed=0,1"], ["--multirun (-m)", "--cfg"]),
    (["--max_steps", "10"], ["--max_steps: no such flag", "key=value"]),
    (["--cfg"], ["--cfg", "expected one argument"]),
    (["seed=0,1"], ["seed=0,1: several values", "-m seed=0,1"]),
    (["seq_len=~/x"], ["seq_len", "~/x", "quote"]),
    (["-m", "seq_len=64,abc"], ["seq_len=abc", "an integer"]),
]


# Only the machine is wrong: these exit with 3, so that scripts can tell.
GRAPH_ON_TWO = ["trainer.cuda_graph=true", "trainer.devices=2", "parallel=ddp"]
UNAVAILABLE = (
    *(["attention=flash"], ["hardware=cuda"]),
    *(["trainer.cuda_graph=true"], GRAPH_ON_TWO, ["callbacks.kernel_times.every=10"]),
    *(["hardware=cpu", f"precision={precision}"] for precision in ("fp16-mixed", "fp8")),
)


@pytest.mark.parametrize(("arguments", "says"), AT_ONCE, ids=lambda x: " ".join(x))
def test_mistakes_found_at_once(flash_train, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, lines = flash_train(*arguments)
    assert code == (3 if arguments in UNAVAILABLE else 1)
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("flash-train: ")
    for words in says:
        assert words in lines[0]
    assert not any(tmp_path.glob("runs*"))


def checkpoint(path: Path, **shape) -> Path:
    """Write a checkpoint of another model; the file's name has its step."""
    values = {"vocab_size": 320, "n_layers": 1, "width": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
    values |= {"mlp_width": 32, "tied_embeddings": False, **shape}
    path.parent.mkdir(parents=True, exist_ok=True)
    hyper_parameters = {"model": ModelConfig(**values).to_dict(), "optimizer": OptimizerConfig(lr=0.5).to_dict()}
    step = int(path.stem.removeprefix("step-"))
    torch.save({"global_step": step, "hyper_parameters": hyper_parameters}, path)
    return path


def test_another_model(flash_train, tiny, tmp_path):
    path = checkpoint(tmp_path / "other" / "step-000005.ckpt", rope_theta=5.0)
    code, lines = flash_train(*tiny, f"resume={path}")
    assert code == 1 and len(lines) == 1, lines
    assert f"resume={path}: the checkpoint is of another model: rope_theta (5.0 saved, 10000.0 here)" in lines[0]


def test_a_rate_that_the_checkpoint_would_override(flash_train, tiny, tmp_path):
    path = checkpoint(tmp_path / "run" / "checkpoints" / "step-000005.ckpt")
    code, lines = flash_train(*tiny, f"resume={path}", "max_steps=9", "optimizer.lr=0.1")
    assert code == 1 and len(lines) == 1, lines
    assert "optimizer.lr=0.1" in lines[0] and "allowed: 0.5" in lines[0]


TOO_LONG = "x" * 300  # for a file system
SWEEP = ["-m", "seed=0,1"]

# Mistakes that show only when files are opened or objects are built; `{tmp}` is the test's folder.
WHEN_BUILT = [
    (["data.path={tmp}/nowhere"], ["data.path={tmp}/nowhere", "no such file or folder"]),
    (["data.path={tmp}/empty"], ["data.path={tmp}/empty", ".txt"]),
    (["data.path={tmp}/blank.txt"], ["data.path={tmp}/blank.txt: the corpus"]),
    (["data.tokenizer={tmp}/none.json"], ["data.tokenizer={tmp}/none.json", "no such file"]),
    (["data.tokenizer={tmp}/blank.txt"], ["data.tokenizer={tmp}/blank.txt", "not a"]),
    (["data=hub", "data.name={tmp}/nowhere"], ["data.name={tmp}/nowhere"]),
    (["model.head_dim=7"], ["model.head_dim", "even", "7"]),
    (["model.head_dim=512"], ["model.head_dim", "256", "512"]),
    (["model.n_heads=3", "model.n_kv_heads=2"], ["model.n_heads=3", "model.n_kv_heads=2"]),
    (["model.vocab_size=100"], ["model.vocab_size=100", "259 or more"]),
    (["model.rope_scaling.factor=2.0"], ["model.rope_scaling.kind"]),
    (["attention=flash"], ["attention=flash: the flash backend cannot run here: there is no NVIDIA GPU", "sdpa, "]),
    (["hardware=cuda"], ["trainer.accelerator=cuda", "auto, cpu"]),
    (["callbacks.kernel_times.every=10"], ["callbacks.kernel_times.every=10: times the kernels", "allowed: null"]),
    (["trainer.cuda_graph=true"], ["trainer.cuda_graph=true: there is no NVIDIA GPU; allowed: auto or false"]),
    (GRAPH_ON_TWO, ["trainer.cuda_graph=true: there is no NVIDIA GPU; allowed: auto or false"]),
    (["model.rope_scaling.kind=ntk", "model.rope_scaling.factor=1e300"], ["model.rope_scaling.factor=1e+300", "ntk"]),
    (["init_from={tmp}/nowhere"], ["init_from={tmp}/nowhere", "no such folder"]),
    (["init_from={tmp}/empty"], ["init_from={tmp}/empty", "config.json"]),
    (["init_from={tmp}/llama", "model=nano"], ["model.width=16", "init_from has 8", "model=pretrained"]),
    (["resume={tmp}/nowhere.ckpt"], ["resume={tmp}/nowhere.ckpt", "no such file"]),
    (["resume={tmp}/empty"], ["resume={tmp}/empty: is a folder", "a checkpoint, or resume=last with run_dir=FOLDER"]),
    (["resume={tmp}/full"], ["resume={tmp}/full: is a folder", "write run_dir={tmp}/full resume=last"]),
    (["resume={tmp}/full/checkpoints"], ["checkpoints: is a folder", "write run_dir={tmp}/full resume=last"]),
    ([f"resume={TOO_LONG}"], [f"resume={TOO_LONG}: ", "name too long"]),
    (["resume=last", f"run_dir={TOO_LONG}"], [f"run_dir={TOO_LONG}: ", "name too long"]),
    (["resume={tmp}/blank.txt"], ["resume={tmp}/blank.txt", "not a checkpoint"]),
    (["resume=last", "run_dir={tmp}/empty"], ["resume=last", "no checkpoint"]),
    (["resume={tmp}/done/step-000005.ckpt"], ["max_steps=3", "step 5"]),
    (["run_dir={tmp}/blank.txt/run"], ["run_dir={tmp}/blank.txt/run", "is a file"]),
    (["run_dir={tmp}/blank.txt"], ["run_dir={tmp}/blank.txt", "is a file"]),
    *(([*flags, "run_dir="], ["run_dir=: must be the name of a folder"]) for flags in ([], SWEEP)),
    (["data.cache_dir="], ["data.cache_dir=: must be the name of a folder"]),
    *(([*flags, "run_dir={tmp}/dangling/run"], ["cannot be created", "allowed: a folder"]) for flags in ([], SWEEP)),
    *(([*flags, f"run_dir={TOO_LONG}"], [f"run_dir={TOO_LONG}: ", "name too long"]) for flags in ([], SWEEP)),
    (["run_dir={tmp}/full"], ["run_dir={tmp}/full", "resume=last"]),
    (["run_dir={tmp}/begun"], ["run_dir={tmp}/begun: holds a run", "another folder", "no checkpoint"]),
    (["run_dir={tmp}/failed"], ["run_dir={tmp}/failed: holds a run", "another folder", "no checkpoint"]),
    (
        ["resume={tmp}/full/checkpoints/step-000005.ckpt", "run_dir={tmp}/full", "max_steps=20", "optimizer.lr=0.5"],
        ["resume={tmp}/full/checkpoints/step-000005.ckpt", "step-000012.ckpt", "resume=last, or another run_dir"],
    ),
    (["-m", "seed=0,1", "run_dir={tmp}/sweep"], ["run_dir={tmp}/sweep/1: holds a run", "another run_dir"]),
    (["run_dir={tmp}/begun", "resume={tmp}/full/checkpoints/step-000005.ckpt"], ["run_dir={tmp}/begun: holds a run"]),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention=flash and hardware=cuda are no mistakes on a GPU")
@pytest.mark.parametrize(("arguments", "says"), WHEN_BUILT, ids=lambda x: " ".join(x))
def test_mistakes_found_when_building(flash_train, tiny, tmp_path, arguments, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    checkpoint(tmp_path / "done" / "step-000005.ckpt")
    checkpoint(tmp_path / "full" / "checkpoints" / "step-000005.ckpt")
    checkpoint(tmp_path / "full" / "checkpoints" / "step-000012.ckpt")
    for name in ("begun/metrics.csv", "failed/summary.json", "sweep/1/metrics.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    llama = ModelConfig(vocab_size=320, n_layers=1, width=8, n_heads=1, n_kv_heads=1, head_dim=8, mlp_width=8)
    save_pretrained(Transformer(llama, attention="sdpa"), llama, tmp_path / "llama")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    if "data=hub" in arguments:
        tiny = [text for text in tiny if not text.startswith("data.path")]

    code, lines = flash_train(*tiny, *(text.format(tmp=tmp_path) for text in arguments))
    assert code == (3 if arguments in UNAVAILABLE else 1)
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("flash-train: ")
    for words in says:
        assert words.format(tmp=tmp_path) in lines[0]

    # Nothing is lost, and no empty run directory is left.
    assert before.items() <= {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}.items()
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="has no /proc")
@pytest.mark.parametrize("flags", [[], SWEEP], ids=["one run", "a sweep"])
def test_a_folder_where_the_system_allows_none(flash_train, tiny, flags):
    """To root, every folder looks writable."""
    code, lines = flash_train(*tiny, *flags, "run_dir=/proc/x")
    assert code == 1 and len(lines) == 1, lines
    assert lines[0].startswith("flash-train: run_dir=/proc/x: ") and "allowed: a folder to write in" in lines[0]


def test_hydra_full_error_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["flash-train", "seq_len=abc"])
    with pytest.raises(UsageError) as caught:
        command.main()
    assert caught.value.__cause__ is not None


def test_a_bug_keeps_its_traceback(flash_train, tiny, monkeypatch):
    monkeypatch.setattr("flash_train.model.Transformer.loss", lambda *args, **kwargs: 1 / 0)
    code, lines = flash_train(*tiny)
    assert code == 1
    assert any("Traceback" in line for line in lines) and any("ZeroDivisionError" in line for line in lines)


def test_a_loss_that_is_not_finite_names_the_step(flash_train, tiny):
    code, lines = flash_train(*tiny, "optimizer.lr=1e30", "optimizer.gradient_clip=0", "trainer.progress_bar=false")
    assert code == 1
    assert len(lines) == 1 and "step" in lines[0] and "optimizer.lr" in lines[0], lines


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_reported_once(tiny, tmp_path):
    """Both ranks find it; only the first reports it."""
    overrides = ["optimizer.lr=1e30", "optimizer.gradient_clip=0", "trainer.progress_bar=false"]
    overrides += ["trainer.devices=2", "trainer.strategy=ddp"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *tiny, *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "MASTER_PORT": str(20000 + os.getpid() % 10000)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("flash-train: ")] == [done.stderr.strip()]
    assert "the training loss is nan at step" in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_mistake_in_a_separate_process(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "seq_len=abc"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "flash-train: seq_len=abc: needs an integer (see docs/choosing.md#batch-size-and-accumulation)\n"
    )
    assert not list(tmp_path.iterdir())


def test_control_c_before_anything_runs_prints_one_line(capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise KeyboardInterrupt
    assert stop.value.code == 130 and capsys.readouterr().err == "flash-train: stopped\n"
