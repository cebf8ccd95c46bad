"""The predicted memory of the CUDA path, compared with a measurement without a GPU.

What a step allocates does not depend on what its kernels compute. So here the fused operations and the
attention run on a CPU with Triton kernels that do nothing, and PyTorch's profiler counts the tensors around them.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")


from flash_train.model import ModelConfig, tiled_mlp
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from tests.support.fused import fused_on_cpu, no_products
from tests.support.profiling.measured_step import measured

MODEL = ModelConfig(
    vocab_size=320, n_layers=3, width=256, n_heads=2, n_kv_heads=2, head_dim=128, mlp_width=704, tied_embeddings=False
)
OTHER = replace(MODEL, n_kv_heads=1, qk_norm=True, tied_embeddings=True, attention_dropout=0.1, residual_dropout=0.1)
STEPS = [
    Step(model, 512, precision=precision, memory=memory)
    for model in (MODEL, OTHER)
    for precision in ("bf16-mixed", "bf16-true")
    for memory in ("none", "selective", "checkpoint")
]
STEPS += [
    Step(model, 2048, precision="bf16-true", memory=memory, keep=keep, offload=offload)
    for model in (replace(MODEL, n_layers=6), replace(OTHER, n_layers=6))
    for memory, keep, offload in (("checkpoint", 0, 1.0), ("selective", 0, 0.5), ("checkpoint", 0.5, 1.0))
]
STEPS += [replace(step, model=replace(MODEL, n_layers=1, mlp_width=4096)) for step in (STEPS[0], STEPS[3])]
STEPS += [
    replace(STEPS[0], seq_len=1024, accumulate=2),
    replace(STEPS[8], accumulate=2),
    replace(STEPS[3], seq_len=3000),
    replace(STEPS[3], in_backward=True),
    replace(STEPS[8], in_backward=True),
    replace(STEPS[11], in_backward=True),
]


@pytest.fixture
def empty_kernels(monkeypatch):
    launched: list[str] = []
    fused_on_cpu(monkeypatch, lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    with no_products():  # which take memory of their own, on a CPU
        yield launched


def label(step: Step) -> str:
    model = "other" if step.model is OTHER else "model" if step.model is MODEL else "wide"
    backward = "-in_backward" * step.in_backward
    return f"{model}-{step.seq_len}-{step.memory}-{step.precision}-{step.accumulate}{backward}"


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["model", "other"])
@pytest.mark.parametrize("memory", ["selective", "checkpoint"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("tiles", [2, 4])
def test_the_peak_of_a_row_of_several_tiles(tiles, in_backward, model, memory, empty_kernels, monkeypatch):
    wide = replace(model, mlp_width=4096)
    step = Step(wide, 2048, precision="bf16-true", memory=memory, in_backward=in_backward)
    whole = predict(step).peak_bytes
    monkeypatch.setattr(tiled_mlp, "TILE_TOKENS", 2048 // tiles)
    found, expected = measured(step), predict(step)
    assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=0.001) and expected.peak_bytes < 0.9 * whole


@pytest.mark.parametrize("step", STEPS, ids=label)
def test_measured_peak_agrees_with_the_prediction(step, empty_kernels):
    found, expected = measured(step), predict(step)
    assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=0.002)
    backward, measured_backward = expected.phases["backward"], found.phases["backward"]
    assert backward.total == pytest.approx(measured_backward.total, rel=0.002)
    for kept in found.kept_by_block.values() if step.offload == 0 else ():
        assert expected.per_layer == pytest.approx(kept, rel=0.01)
    kinds = ("norms", "attention", "residual stream") if step.model is MODEL else ()  # else norms of q and k are either
    for kind in kinds:
        assert backward.parts[kind] == pytest.approx(measured_backward.parts[kind], rel=0.002), kind
    assert {"attention_backward_dq", "rotary_kernel", "cross_entropy_kernel", "gradients_kernel"} <= set(empty_kernels)
