"""``explain`` names the backend of a call and the reasons."""

from unittest import mock

import pytest
import torch

from flash_train.attention import AttentionSpec, BlockSparse, Causal, RngState, attention, explain

x = torch.zeros(1, 32, 2, 64)


def test_auto_chooses_sdpa_on_a_cpu():
    words = explain(x, x, x, AttentionSpec(Causal()))
    assert words.startswith("sdpa: flash cannot run: there is no NVIDIA GPU")


def test_features_that_sdpa_lacks_are_named():
    words = explain(x, x, x, AttentionSpec(softcap=20.0))
    assert words.startswith("reference: flash cannot run") and "sdpa cannot run either" in words


def test_explain_raises_the_same_errors_as_the_call():
    for call in (attention, explain):
        with pytest.raises(ValueError, match="kernels"):
            call(x, x, x, backend="kernels")
        with pytest.raises(ValueError, match="q's must be a multiple of k's"):
            call(x, x[:, :, :1].expand(1, 32, 3, 64), x[:, :, :1].expand(1, 32, 3, 64))


def test_explain_names_the_forward_and_backward_kernels():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    from flash_train.attention.kernels import families

    def on_hopper(*tensors, asked="flash", **options):
        with (
            mock.patch("flash_train.attention.functional.resolve_backend", return_value=(asked, "")),
            mock.patch.object(families, "device_unavailable", return_value=None),
        ):
            return explain(*tensors, **options)

    narrow = torch.zeros(1, 32, 2, 64, dtype=torch.bfloat16)
    per_head = AttentionSpec(BlockSparse(torch.ones(2, 1, 1, dtype=torch.bool)))
    spec = AttentionSpec(Causal(), dropout=0.1)
    assert on_hopper(narrow, narrow, narrow, spec, rng=RngState(1)) == (
        "flash: forward by the Hopper kernels, backward by the Hopper kernels"
    )
    assert on_hopper(narrow, narrow[:, :, :1], narrow[:, :, :1], per_head) == (
        "flash: forward by the Hopper kernels, backward by the portable kernels "
        "(heads that share keys have block patterns of their own)"
    )
    assert "forward by the portable kernels (dtype torch.float32 is neither" in on_hopper(x, x, x)
    assert on_hopper(narrow, narrow, narrow, asked="triton").startswith(
        "triton: forward by the portable kernels (they w"
    )
    with pytest.raises(ValueError, match="the hopper backend cannot run this: dtype torch.float32"):
        on_hopper(x, x, x, asked="hopper")
    cut = torch.zeros(1, 32, 2, 64, dtype=torch.bfloat16)[..., :60]
    assert "forward by the portable kernels (q's head_dim 60 is not a multiple of 8)" in on_hopper(cut, cut, narrow)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert on_hopper(x, x, x).startswith("flash: forward by the Hopper kernels")
