"""Rotary frequencies compared with transformers, and the cos and sin tables."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flash_train.model import RopeScaling
from flash_train.model.ops import apply_rotary
from flash_train.model.rope import rope_frequencies, rope_tables
from tests.support.model.tiny import tiny_config

SCALINGS = [
    RopeScaling("linear", 4.0),
    RopeScaling("yarn", 8.0, 4096),
    RopeScaling("yarn", 4.0, 2048, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    RopeScaling("yarn", 1.0, 2048),
    RopeScaling("llama3", 8.0, 8192),
    RopeScaling("llama3", 32.0, 8192, low_freq_factor=2.0, high_freq_factor=6.0),
]


def llama_config(theta: float, head_dim: int, **rope) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **rope},
    )


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s.kind}-{s.factor}")
def test_rope_frequencies_equal_transformers(scaling, theta, head_dim):
    config = tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    ours, ours_scale = rope_frequencies(config)
    theirs, theirs_scale = ROPE_INIT_FUNCTIONS[scaling.kind](llama_config(theta, head_dim, **scaling.to_hf()), "cpu")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours_scale == pytest.approx(theirs_scale, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_ntk_equals_dynamic_ntk_of_transformers_at_one_length(factor):
    """Dynamic NTK with factor 1 at `factor` times the trained length has the base of the fixed rule."""
    ours, _ = rope_frequencies(tiny_config(head_dim=64, rope_scaling=RopeScaling("ntk", factor)))
    llama = llama_config(1e4, 64, rope_type="dynamic", factor=1.0)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama, "cpu", seq_len=int(factor * 4096))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_each_rule_changes_the_frequencies():
    plain, _ = rope_frequencies(tiny_config())
    for scaling in [*SCALINGS, RopeScaling("ntk", 2.0)]:
        if scaling.factor > 1:
            assert not torch.equal(rope_frequencies(tiny_config(rope_scaling=scaling))[0], plain), scaling


def test_tables_stay_fp32_in_a_bf16_model_and_far_positions_differ():
    positions = torch.tensor([0, 1, 100_000, 100_001])
    cos, sin = rope_tables(tiny_config(), positions)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (4, 8)
    torch.testing.assert_close(cos[:, 0].double(), positions.double().cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0].double(), positions.double().sin(), rtol=0, atol=1e-6)


def test_scores_depend_on_distance_alone():
    """The encoding is relative: q at m and k at n have the same score as q at m+s and k at n+s."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(m: int, n: int) -> float:
        cos, sin = rope_tables(tiny_config(), torch.tensor([m, n]))
        rotated_q, _ = apply_rotary(q, k, cos[:1], sin[:1])
        _, rotated_k = apply_rotary(q, k, cos[1:], sin[1:])
        return (rotated_q * rotated_k).sum().item()

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-2
