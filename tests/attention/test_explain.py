"""What ``explain`` says of a call."""

from unittest import mock

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, RngState, attention, explain

x = torch.zeros(1, 32, 2, 64)


def test_a_cpu_takes_pytorchs():
    words = explain(x, x, x, AttentionSpec(Causal()))
    assert words.startswith("sdpa: flash cannot run: there is no NVIDIA GPU")


def test_what_sdpa_cannot_do():
    words = explain(x, x, x, AttentionSpec(softcap=20.0))
    assert words.startswith("reference: flash cannot run") and "neither can sdpa" in words


def test_mistakes_are_those_of_the_call():
    for call in (attention, explain):
        with pytest.raises(ValueError, match="kernels"):
            call(x, x, x, backend="kernels")
        with pytest.raises(ValueError, match="q's must be a multiple of k's"):
            call(x, x[:, :, :1].expand(1, 32, 3, 64), x[:, :, :1].expand(1, 32, 3, 64))


def test_which_kernels():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flash_train.attention.kernels import choice
    from flash_train.attention.kernels.hopper import launch

    wide = torch.zeros(1, 32, 2, 256, dtype=torch.bfloat16)
    with (
        mock.patch("flash_train.attention.functional.resolve_backend", return_value=("flash", "")),
        mock.patch.object(choice, "_may_be_hopper", return_value=True),
        mock.patch.object(launch, "device_unavailable", return_value=None),
    ):
        spec = AttentionSpec(Causal(), dropout=0.1)
        assert explain(wide[..., :64], wide[..., :64], wide[..., :64], spec, rng=RngState(1)) == (
            "flash: forward by Hopper's kernels, backward by Hopper's kernels"
        )
        assert explain(wide, wide, wide) == (
            "flash: forward by Hopper's kernels, backward by the portable ones (head_dim 256 is more than 128)"
        )
        assert "forward by the portable ones (dtype torch.float32 is neither" in explain(x, x, x)
