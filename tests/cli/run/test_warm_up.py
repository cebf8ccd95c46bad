"""The warm-up compiles the kernels that a step launches, each in the form in which the step launches it.

Here kernels only record how they were launched; on a GPU, Triton reports what it compiled.
"""

import csv
import json
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention import Packing, backends
from flash_train.attention.kernels import families
from flash_train.attention.kernels.launch_options import launch_options
from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.run import warm_up
from flash_train.model import Transformer
from tests.support.fused import fused_on_cpu
from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]
LATER = {"cross_entropy_kernel", "adamw_kernel"}  # they depend on the vocabulary or on all weights
TINY = ("model=nano", "seq_len=512", "trainer.accelerator=cpu")
RUNS = {
    "bf16-true": ("precision=bf16-true",),
    "bf16-mixed": ("precision=bf16-mixed",),
    "fp32": ("precision=fp32",),
    "dropout": ("precision=bf16-true", "attention.dropout=0.1", "model.residual_dropout=0.1"),
    "shared keys, normalised": ("precision=bf16-true", "model.n_kv_heads=1", "model.qk_norm=true"),
    "short": ("precision=bf16-true", "seq_len=64"),
    "long": ("precision=bf16-true", "seq_len=8192"),
    "odd": ("precision=bf16-true", "seq_len=1000"),
    "long and odd": ("precision=bf16-true", "seq_len=5000"),
    "whole rows": ("precision=bf16-true", "data.packing=concat"),
    "recomputed": ("precision=bf16-mixed", "memory=checkpoint"),
}


def form(x: object, specialised: bool = True) -> object:
    """What Triton compiles an argument for."""
    if isinstance(x, torch.Tensor):
        return x.dtype
    if isinstance(x, tuple):
        return tuple(form(part) for part in x)
    if hasattr(x, "base"):  # a descriptor of TMA's
        return x.base.dtype, tuple(x.block_shape), x.layout
    if isinstance(x, bool) or not isinstance(x, int | float):
        return x
    return (int, x == 1, x % 16 == 0) if isinstance(x, int) and specialised else type(x)


@pytest.fixture
def launches(monkeypatch):
    """Kernels that have been launched, with the form of their arguments."""
    found: set[tuple[object, ...]] = set()

    def run(kernel, *arguments, grid, warmup, **named):
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        forms = []
        for name, x in sorted(named.items()):
            parameter = next((p for p in kernel.params if p.name == name), None)  # None: an option of the compiler's
            constant = parameter is None or parameter.is_constexpr
            forms.append((name, x if constant else form(x, not parameter.do_not_specialize)))
        found.add((kernel.fn.__name__, *forms))

    fused_on_cpu(monkeypatch, run)
    return found


def step(config) -> None:
    """The forward and backward of a step, as training runs them."""
    weights = torch.bfloat16 if config.precision == "bf16-true" else torch.float32
    model = Transformer(build_model_config(config, 259, None), attention="flash", memory=config.memory.mode)
    model = model.to(weights)
    tokens = torch.zeros((1, config.seq_len), dtype=torch.int64)
    several = [] if config.data.packing == "concat" else [*range(300, config.seq_len, 300), *[config.seq_len] * 40]
    cu_seqlens = torch.tensor([0, *several, config.seq_len], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16-mixed"):
        loss, _ = model.loss(tokens, tokens, packing=Packing(cu_seqlens, cu_seqlens))
    loss.backward()


def kernels_of_warm_up_and_step(config, launches) -> tuple[set[str], set[str]]:
    """Names of the kernels in the warm-up, and of the kernels that the step launches in other forms."""
    for each in warm_up.warm_ups(config, torch.device("cpu")):
        each()
    warmed = set(launches)
    step(config)
    return {name for name, *_ in warmed}, {name for name, *_ in launches - warmed}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_a_step_launches_the_kernels_of_the_warm_up(overrides, launches):
    warmed, others = kernels_of_warm_up_and_step(compose_config((*TINY, *overrides)), launches)
    assert others <= LATER
    assert {"attention_forward", "attention_backward_dkdv", "rotary_kernel"} <= warmed


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("seq_len", [512, 1000, 8192])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_launches_the_warmed_up_kernels_of_hopper(dropout, head_dim, seq_len, packing, launches, monkeypatch):
    monkeypatch.setattr(families, "device_unavailable", lambda *_: None)
    options = (f"seq_len={seq_len}", f"data.packing={packing}", f"model.head_dim={head_dim}")
    config = compose_config((*TINY, "precision=bf16-true", f"attention.dropout={dropout}", *options))
    with launch_options(processors=132):
        warmed, others = kernels_of_warm_up_and_step(config, launches)
    assert others <= LATER
    assert {"hopper_forward", "hopper_prepare", "rotary_kernel"} <= warmed
    assert ("hopper_backward" if head_dim < 256 else "hopper_backward_dq") in warmed


def test_number_of_warm_ups_by_configuration(monkeypatch):
    cpu = torch.device("cpu")
    assert warm_up.warm_ups(compose_config((*TINY, "attention=sdpa")), cpu) == []
    with pytest.raises(UsageError, match=r"model\.n_kv_heads"):
        warm_up.warm_ups(compose_config((*TINY, "model.n_heads=4", "model.n_kv_heads=3")), cpu)
    monkeypatch.setattr(backends, "flash_unavailable", lambda *_: None)
    assert len(warm_up.warm_ups(compose_config(TINY), cpu)) == 3
    assert len(warm_up.warm_ups(compose_config((*TINY, "compile=true")), cpu)) == 2
    monkeypatch.setattr(warm_up, "interpreting", lambda: True)
    assert warm_up.warm_ups(compose_config(TINY), cpu) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.accelerator=cpu",),
        ("trainer.devices=2",),
        ("trainer.num_nodes=2",),
        ("trainer.deterministic=true",),
        ("validate_only=true",),
    ],
)
def test_runs_without_a_warm_up(overrides, monkeypatch):
    if "accelerator" not in overrides[0]:
        monkeypatch.setattr(warm_up, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(warm_up, "warm_ups", lambda *_: pytest.fail("warmed up"))
    with warm_up.warming_up(compose_config(("model=nano", *overrides))):
        pass


@pytest.fixture
def on_card(monkeypatch):
    """Sets the warm-ups, on a pretended GPU; returns the calls that freed its memory."""
    done: list[str] = []
    monkeypatch.setattr(warm_up, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(warm_up, "shared_triton", nullcontext)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))

    def set_warm_ups(*warm_ups) -> list[str]:
        monkeypatch.setattr(warm_up, "warm_ups", lambda *_: warm_ups)
        return done

    return set_warm_ups


def test_warm_ups_run_in_parallel_to_the_block_and_end_with_it(on_card):
    began, go_on = threading.Barrier(3, timeout=120), threading.Event()
    ended = []

    def warm() -> None:
        began.wait()
        assert go_on.wait(120)
        time.sleep(0.05)
        ended.append(threading.get_ident())

    done = on_card(warm, warm)
    with warm_up.warming_up(compose_config(("model=nano",))):
        began.wait()  # both, and this thread
        go_on.set()
    assert len(set(ended)) == 2 and threading.get_ident() not in ended
    assert done == ["synchronize", "empty_cache", "reset_peak_memory_stats"]


def test_errors_in_a_warm_up(on_card):
    def fail(error: Exception) -> None:
        raise error

    kept = []

    def exhaust(error: Exception) -> None:
        taken = torch.zeros(3)
        kept.append(weakref.ref(taken))
        raise error

    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        done = on_card(lambda error=error: exhaust(error))
        with warm_up.warming_up(compose_config(("model=nano",))):
            pass
        assert "empty_cache" in done
        error.__traceback__ = None  # which this test has kept
    assert not any(taken() is not None for taken in kept)
    on_card(lambda: fail(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"), warm_up.warming_up(compose_config(("model=nano",))):
        pass
    on_card(lambda: None)
    with pytest.raises(UsageError, match="a mistake"), warm_up.warming_up(compose_config(("model=nano",))):
        raise UsageError("a mistake")


def test_filters_of_warnings_stay_as_they_are(monkeypatch):
    """As the import of Lightning has left them, whatever Triton 3.6 does with them in other threads."""
    from triton.compiler import code_generator
    from triton.runtime import driver

    there = SimpleNamespace(get_current_device=lambda: 0)
    monkeypatch.setattr(type(driver), "active", property(lambda _: there))
    with warnings.catch_warnings():
        with warm_up.shared_triton(), code_generator.warnings.catch_warnings():
            code_generator.warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="of another thread")
        assert code_generator.warnings is warnings
        assert warnings.filters[0][1].pattern == "of another thread"


def test_warm_up_does_not_import_lightning():
    code = "import sys, flash_train.cli.run.warm_up; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.gpu
def test_warm_up_does_not_change_the_run(tmp_path):
    """Its weights and masks come from generators that are seeded after the warm-up. Later steps may differ, because
    Hopper's gradients of queries are summed in any order."""
    code = "from flash_train.cli import train; train.main()"
    without = (
        "import contextlib; from flash_train.cli.run import warm_up; warm_up.warming_up = contextlib.nullcontext; "
    )
    options = (
        *("model=nano", "seq_len=1024", "data=recall", "attention.dropout=0.1", "model.residual_dropout=0.1"),
        *("max_steps=1", "log_every=1", "logger=none", "trainer.checkpoints=false"),
    )
    losses = []
    for name, start in (("with", code), ("without", f"{without}{code}")):
        command = [sys.executable, "-c", start, *options, f"run_dir={tmp_path / name}"]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        with (tmp_path / name / "metrics.csv").open(encoding="utf-8") as file:
            losses.append([row["train/loss"] for row in csv.DictReader(file)])
    assert losses[0] == losses[1] and len(losses[0]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("model", ["125m", "1b3"])
def test_first_step_compiles_almost_nothing(model, packing, tmp_path):
    """In its own process, with nothing compiled before and nothing left in the device's memory. With 64 columns, one
    long document launches other kernels than many short ones."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.cli.first_step", f"model={model}", f"data.packing={packing}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    compiled = json.loads(found.stdout.splitlines()[-1])
    assert set(compiled["in the step"]) <= LATER
    assert "norm_forward_kernel" in compiled["in the warm-up"]
    assert len(compiled["in the warm-up"]) == len({tuple(x) for x in compiled["forms"]})  # none twice
    assert compiled["kept"] <= 2 * 40 * 2**20  # cuBLAS's workspaces, which stay
    assert compiled["workspaces of the step"] == 0
