"""The registry of kernel families: one entry is enough for a new family, and no other file names one."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

import flash_train
from flash_train.attention import (
    BACKENDS,
    AttentionSpec,
    attention,
    backends,
    cached_attention,
    explain,
    flash_attn_func,
    resolve_backend,
)
from flash_train.attention.kernels import families
from flash_train.attention.kernels.families import FAMILIES, HOPPER, PORTABLE, fastest_on
from flash_train.model import ModelConfig
from flash_train.profiling.attention import peers
from flash_train.profiling.memory.step import Step, training_backends
from tests.support.attention.fake_family import FAKE, registered

PACKAGE = Path(flash_train.__file__).parent
CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=320, n_layers=2, width=128, n_heads=2, n_kv_heads=2, head_dim=64, mlp_width=256)


@pytest.fixture
def fake(monkeypatch):
    """The third family, on a CPU that this project's kernels can run on."""
    monkeypatch.setattr(backends, "flash_unavailable", lambda *_: None)
    with registered() as ran:
        yield ran


def inputs():
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    return q.requires_grad_(), k, v


@pytest.mark.parametrize("backend", ["fake", "flash", "auto"])
def test_registered_family_runs_calls(fake, backend):
    q, k, v = inputs()
    out = attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert fake == ["forward", "backward"]
    expected = attention(q, k, v, backend="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0])


def test_registered_family_runs_compiled_calls(fake):
    torch._dynamo.reset()
    q, k, v = inputs()
    out = torch.compile(lambda *x: attention(*x, backend="fake"), fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, attention(q, k, v, backend="reference"))
    assert "forward" in fake


def test_explain_names_the_registered_family(fake):
    q, k, v = inputs()
    assert explain(q, k, v, backend="flash") == "flash: forward by the fake kernels, backward by the fake kernels"
    assert explain(q, k, v, sinks=torch.zeros(2), backend="fake") == (
        "fake: forward by the fake kernels, backward by none (it has no gradient of sinks)"
    )
    assert explain(q, k, v, sinks=torch.zeros(2), backend="flash") == (
        "flash: forward by the fake kernels, "
        "backward by the portable kernels (it has no gradient of sinks; the tensors are on cpu)"
    )
    words = explain(q, k, v, AttentionSpec(softcap=5.0), backend="flash")
    assert words.startswith("flash: forward by the portable kernels (it has no softcap; the tensors are on cpu)")


def test_named_family_refuses_calls_that_it_cannot_run(fake):
    q, k, v = inputs()
    for call in (attention, explain):
        with pytest.raises(ValueError, match="the fake backend cannot run this: it has no softcap; flash can"):
            call(q, k, v, AttentionSpec(softcap=5.0), backend="fake")


def test_named_family_refuses_a_backward_that_it_cannot_run(fake):
    q, k, v = inputs()
    out = attention(q, k, v, sinks=torch.zeros(2), backend="fake")
    message = "the fake backend cannot run the backward: it has no gradient of sinks; flash can"
    with pytest.raises(ValueError, match=message):
        out.sum().backward()
    assert fake == ["forward"] and q.grad is None


def test_backend_names_come_from_the_registry(fake):
    assert set(backends.backend_names()) == {*BACKENDS, "fake"} and "fake" in training_backends()
    resolved = resolve_backend("fake", device="cpu", dtype=torch.float32, head_dim=8)
    assert resolved == ("fake", "this project's kernels run here")
    with pytest.raises(ValueError, match="must be one of auto, flash, triton, hopper, fake, sdpa"):
        resolve_backend("faked", device="cpu", dtype=torch.float32, head_dim=8)
    q, k, v = inputs()
    with pytest.raises(ValueError, match="the fake kernels have no cache; use auto, flash, triton, reference"):
        cached_attention(q.detach(), k, v, 4, backend="fake")
    with pytest.raises(ValueError, match="backend=fake gives repeatable gradients only under"):
        flash_attn_func(q, k, v, deterministic=True, backend="fake")


def test_predicted_memory_uses_the_families_attributes():
    wide = replace(FAKE, widest_dq_accumulator=64)
    with registered(wide):
        step = Step(MODEL, 512, attention="fake", family="fake")
        assert step.accumulates_dq and not replace(step, precision="fp32").accumulates_dq
        assert not replace(step, model=replace(MODEL, head_dim=72)).accumulates_dq
    with pytest.raises(ValueError, match="attention='fake': must be one of"):
        Step(MODEL, 512, attention="fake")


def test_benchmarks_list_the_registered_family():
    from flash_train.profiling.attention.cases import cases

    with registered():
        assert peers.implementations(next(iter(cases())))[:2] == ("fake", "triton")
        assert fastest_on(CPU) == FAKE
    assert fastest_on(CPU) == PORTABLE


def test_family_refuses_other_devices(monkeypatch):
    with registered(replace(FAKE, capability=(12, 0), chip="Faker")):
        with pytest.raises(ValueError, match="the fake backend cannot run here: "):
            resolve_backend("fake", device="cpu", dtype=torch.float32, head_dim=8)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        families.device_unavailable.cache_clear()
        try:
            card = torch.device("cuda", 7)
            reason = FAMILIES["fake"].unavailable(card)
            assert reason == "the GPU has compute capability 9.0 and the kernels are for 12.0 (Faker)"
            assert HOPPER.unavailable(card) is None
        finally:
            families.device_unavailable.cache_clear()


def test_no_other_file_names_a_family_for_one_chip():
    allowed = (PACKAGE / "attention/kernels/families.py", *(PACKAGE / "attention/kernels/hopper").rglob("*"))
    files = set(PACKAGE.rglob("*.py")) - set(allowed)
    assert len(files) > 100
    named = [str(file) for file in files if re.search("hopper", file.read_text(encoding="utf-8"), re.IGNORECASE)]
    assert named == []


def test_calls_without_hopper_kernels_import_no_gluon():
    program = """
import sys, torch
from flash_train.attention import attention, backends, explain
backends.flash_unavailable = lambda *_: None
x = torch.zeros(1, 16, 2, 64)
print(explain(x, x, x, backend="flash"))
print([name for name in sys.modules if "kernels.hopper" in name])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    chosen = "the portable kernels (the tensors are on cpu)"
    assert run.stdout.splitlines() == [f"flash: forward by {chosen}, backward by {chosen}", "[]"]
