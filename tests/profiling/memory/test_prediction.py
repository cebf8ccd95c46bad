"""The predicted memory of a training step, compared with the measurement of PyTorch's profiler on a CPU."""

from dataclasses import replace
from typing import Any

import pytest

from flash_train.model import ModelConfig
from flash_train.model.kernels.common import MAX_LOGIT_TOKENS
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.prediction import KINDS, _StepWalk, predict
from flash_train.profiling.memory.step import Step
from tests.support.profiling.measured_step import measured
from tests.support.tiers import slow_after

MODEL = ModelConfig(
    vocab_size=320, n_layers=3, width=192, n_heads=4, n_kv_heads=2, head_dim=48, mlp_width=528, tied_embeddings=False
)
OTHER = ModelConfig(
    vocab_size=4096, n_layers=2, width=256, n_heads=4, n_kv_heads=4, head_dim=32, mlp_width=384, qk_norm=True,
    residual_dropout=0.1, tied_embeddings=True,
)  # fmt: skip
DROPS = replace(MODEL, attention_dropout=0.1)


STEPS = [
    Step(MODEL, 2048, precision="fp32", memory=memory, attention="sdpa", fused=False)
    for memory in ("none", "selective", "checkpoint")
]
STEPS += [
    replace(STEPS[0], precision="bf16-mixed"),
    replace(STEPS[2], model=OTHER, seq_len=256, in_backward=True),
    replace(STEPS[1], precision="bf16-mixed"),
    replace(STEPS[2], precision="bf16-mixed"),
    replace(STEPS[2], precision="bf16-mixed", seq_len=512),
    replace(STEPS[0], precision="bf16-true"),
    replace(STEPS[0], accumulate=2),
    replace(STEPS[0], in_backward=True, seq_len=256),
    replace(STEPS[2], in_backward=True, precision="bf16-mixed", seq_len=256),
    replace(STEPS[2], model=OTHER, seq_len=256, accumulate=2),
    replace(STEPS[0], seq_len=777),
    replace(STEPS[0], attention="standard", seq_len=1024),
    replace(STEPS[2], attention="standard", seq_len=1024),
    replace(STEPS[0], attention="chunked", seq_len=1500),
    replace(STEPS[0], model=OTHER, seq_len=1500),
    replace(STEPS[2], model=OTHER, seq_len=1500),
    replace(STEPS[0], model=DROPS, seq_len=1024),
    replace(STEPS[0], model=DROPS, seq_len=1024, precision="bf16-mixed"),
    replace(STEPS[1], model=DROPS, seq_len=1024),
    replace(STEPS[2], model=DROPS, seq_len=1024),
    replace(STEPS[0], model=DROPS, seq_len=1024, attention="standard"),
    replace(STEPS[0], model=DROPS, seq_len=1500, attention="chunked"),
]


def label(step: Step) -> str:
    model = {id(OTHER): "other", id(DROPS): "drops"}.get(id(step.model), "model")
    backward = "-in_backward" * step.in_backward
    return f"{model}-{step.seq_len}-{step.memory}-{step.attention}-{step.precision}-{step.accumulate}{backward}"


@pytest.mark.parametrize("step", slow_after(8, STEPS), ids=label)
def test_measured_peak_agrees_with_the_prediction(step):
    found, expected = measured(step), predict(step)
    assert expected.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)
    for kept in found.kept_by_block.values():
        assert expected.per_layer == pytest.approx(kept, rel=0.05)


def test_parts_add_up_and_have_known_names():
    for step in STEPS:
        prediction = predict(replace(step, fused=True, attention="flash"))
        assert prediction.peak_bytes == max(m.total for _, m in prediction.moments)
        assert set(prediction.peak.parts) <= set(KINDS)
        assert prediction.peak == max(prediction.phases.values(), key=lambda m: m.total)


def test_step_ends_with_only_lasting_tensors():
    """After a step there are weights, gradients, optimizer state, the batch and its tables."""
    for step in STEPS:
        prediction = predict(step)
        _, last = prediction.moments[-1]
        static = {"weights", "gradients", "optimizer state", "batch and tables", "matrix-product workspace"}
        assert {kind for kind, size in last.parts.items() if size} <= static


B3 = ModelConfig(
    vocab_size=320, n_layers=24, width=2048, n_heads=16, n_kv_heads=16, head_dim=128, mlp_width=5632,
    tied_embeddings=False,
)  # fmt: skip


def test_under_autocast_the_loss_has_a_copy_of_the_head():
    """The logits of a chunk, the gradients that are made with them, and the head in 16 bits."""

    def of_the_loss(precision: str) -> int:
        parts = predict(Step(B3, 4096, precision=precision)).phases["loss"].parts
        return parts["logits and loss"] + parts.get("autocast copies", 0)

    head, hidden = B3.vocab_size * B3.width, 4096 * B3.width
    common = 2 * hidden + 4 * head + 4 * 4096 + 2 * MAX_LOGIT_TOKENS * B3.vocab_size
    copies = 2 * B3.n_layers * (4 * 2048 * 2048 + 3 * 2048 * 5632)
    assert of_the_loss("bf16-true") == common
    assert of_the_loss("bf16-mixed") == common + 2 * head + copies


def test_pytorchs_attention_sums_the_gradient_of_the_queries_in_fp32():
    def predicted(attention: str, dropout: float = 0.0, **options):
        return predict(Step(replace(B3, attention_dropout=dropout), 4096, attention=attention, **options))

    def workspace(attention: str, **device: Any) -> int:
        return max(m.parts.get("attention workspace", 0) for _, m in predicted(attention, **device).moments)

    rows, heads = 4096 * 16, 4096 * 2048
    assert workspace("flash") == 2 * 4 * rows and workspace("sdpa") == 4 * (rows + heads)
    # Hopper's kernels begin each entry at a multiple of 128 rows
    for settings, blocks in (({}, 2), ({"lengths": (4000, 96)}, 3), ({"row_entries": 40}, 41)):
        assert workspace("flash", family="hopper", **settings) == 4 * (2 * 16 + 2048) * (4096 + 128 * blocks)
    assert workspace("triton", family="hopper") == 2 * 4 * rows
    # With dropout it takes a document at a time, and the results are joined; unless they are a batch.
    for documents, joined in (((4000, 96), 2 * heads), ((1024,) * 4, 0)):
        own, theirs = (
            predicted(name, 0.1, lengths=documents).per_layer - predicted(name, lengths=documents).per_layer
            for name in ("flash", "sdpa")
        )
        assert (own, theirs) == (0, joined)


def test_the_optimizers_state_takes_what_its_formats_take():
    def state(**formats: Any) -> float:
        step = Step(B3, 1024, **{"precision": "bf16-true", **formats})
        return predict(step).phases["forward"].parts["optimizer state"] / B3.num_parameters

    blocks = 2 * 4 / 2048
    for formats, size in (
        ({}, 2 + 4), ({"master": "stochastic"}, 4), ({"master": "none", "moments": "fp32"}, 8),
        ({"moments": "8bit"}, 2 + 2 * (1 + 4 / 256)), ({"precision": "bf16-mixed"}, 8),
        ({"precision": "bf16-mixed", "moments": "8bit"}, 2 * (1 + 4 / 256)), ({"offload_optimizer": True}, 0),
    ):  # fmt: skip
        assert state(**formats) == pytest.approx(size + blocks, rel=0.002, abs=0.01), formats
    offloaded = predict(Step(B3, 1024, precision="bf16-true", offload_optimizer=True))
    assert offloaded.host_bytes == pytest.approx(6 * B3.num_parameters, rel=0.005)
    copies = offloaded.phases["step"].parts["optimizer state"] - offloaded.phases["forward"].parts["optimizer state"]
    assert copies == 2 * 2**25 * 6  # two sets of 32 million elements


@pytest.mark.parametrize("memory", ["none", "selective", "checkpoint"])
def test_attention_grows_linearly_with_flash_and_with_the_square_of_the_length_without(memory):
    def attention(backend: str, length: int) -> int:
        step = Step(MODEL, length, memory=memory, attention=backend)
        return max(
            m.parts.get("attention", 0) + m.parts.get("attention workspace", 0) for _, m in predict(step).moments
        )

    assert attention("flash", 65536) == pytest.approx(4 * attention("flash", 16384), rel=0.01)
    assert attention("standard", 65536) == pytest.approx(16 * attention("standard", 16384), rel=0.05)


@pytest.mark.parametrize("field", ["precision", "memory", "attention"])
def test_unknown_settings_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}='nonsense': must be one of"):
        predict(replace(STEPS[0], **{field: "nonsense"}))


def test_ledger_refuses_unknown_names():
    ledger = Ledger()
    ledger.hold("x", "norms", 4)
    with pytest.raises(ValueError, match="x is held already"):
        ledger.hold("x", "norms", 4)
    for mistake in (ledger.release, ledger.size_of, lambda name: ledger.rename(name, "z")):
        with pytest.raises(ValueError, match="y is not held"):
            mistake("y")
    ledger.release("x")
    assert not ledger.held and ledger.peak().total == 512


@pytest.mark.parametrize("step", [*STEPS, *(replace(step, precision="fp8") for step in STEPS[:3])], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["pytorch", "fused"])
def test_step_releases_everything_that_its_blocks_held(step, fused):
    walk = _StepWalk(replace(step, fused=fused))
    walk.run()
    lasting = {"weights", "optimizer", "optimizer's blocks", "workspace", "batch", "gradients"}
    assert {name for name in walk.ledger.held if not name.startswith("gradient ")} <= lasting
