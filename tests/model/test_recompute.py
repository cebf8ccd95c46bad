"""memory=none, selective and checkpoint have the same gradients, and recompute only what they should."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_train.attention import AttentionSpec
from flash_train.model import MEMORY_MODES, Transformer, layers, recompute
from flash_train.model.recompute import first_kept
from tests.support.model.tiny import packing_of, random_batch, tiny_config, tiny_model

LENGTHS = (20, 7, 37)
CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Calls(TorchDispatchMode):
    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == self.operator
        return func(*args, **(kwargs or {}))


def loss_and_gradients(mode: str, attention: str = "sdpa", **overrides) -> list[torch.Tensor]:
    model = tiny_model(memory=mode, attention=attention, **overrides).train()
    tokens, labels = random_batch((2, 32), 96)
    torch.manual_seed(5)
    loss, count = model.loss(tokens, labels, packing=packing_of(LENGTHS))
    (loss / count).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("attention", ["sdpa", "standard"])
@pytest.mark.parametrize("dropouts", [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
@pytest.mark.parametrize("mode", ["selective", "checkpoint"])
def test_gradients_equal_those_without_recomputation(mode, dropouts, attention):
    options = {"attention": attention, "attention_dropout": dropouts[0], "residual_dropout": dropouts[1]}
    for got, expected in zip(loss_and_gradients(mode, **options), loss_and_gradients("none", **options), strict=True):
        assert torch.equal(got, expected)


def test_dropout_changes_the_loss_in_training():
    plain = loss_and_gradients("none")[0]
    assert loss_and_gradients("none", residual_dropout=0.2)[0] != plain
    assert loss_and_gradients("none", attention_dropout=0.2)[0] != plain
    tokens, labels = random_batch((2, 32), 96)
    model = tiny_model(residual_dropout=0.2, attention_dropout=0.2).eval()
    assert torch.equal(model.loss(tokens, labels)[0], tiny_model().eval().loss(tokens, labels)[0])


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 1), ("checkpoint", 2)])
def test_number_of_attention_runs_by_memory_mode(mode, runs):
    with Calls(CPU_FLASH) as calls:
        loss_and_gradients(mode, n_layers=3)
    assert calls.count == runs * 3 * len(LENGTHS)  # sdpa: a call per layer and document


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 2), ("checkpoint", 2)])
def test_number_of_mlp_runs_by_memory_mode(mode, runs):
    with Calls("aten::silu") as calls:
        loss_and_gradients(mode, n_layers=3)
    assert calls.count == runs * 3


@pytest.mark.parametrize(("keep", "kept"), [(0.0, 0), (0.25, 1), (0.7, 3), (1.0, 4)])
@pytest.mark.parametrize("mode", ["selective", "checkpoint"])
def test_kept_blocks_run_once_and_are_the_last_ones(mode, keep, kept):
    dropouts = {"attention_dropout": 0.2, "residual_dropout": 0.1}
    with Calls("aten::silu") as calls:
        found = loss_and_gradients(mode, n_layers=4, keep=keep, **dropouts)
    assert calls.count == 4 + (4 - kept)
    for got, expected in zip(found, loss_and_gradients("none", n_layers=4, **dropouts), strict=True):
        assert torch.equal(got, expected)
    assert first_kept(4, mode, keep) == 4 - kept and first_kept(4, "none", keep) == 0


def test_a_share_of_kept_blocks_is_at_most_all():
    with pytest.raises(ValueError, match=r"memory.keep=1.5: must be in \[0, 1\]"):
        Transformer(tiny_config(), memory="checkpoint", keep=1.5)


@torch.library.custom_op("flash_train_tests::noisy_attention", mutates_args=())
def noisy_attention(v: torch.Tensor) -> torch.Tensor:
    """An operator that draws its dropout inside, as PyTorch's fused CUDA kernels do."""
    return v * torch.rand_like(v)


noisy_attention.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0]),
)


def test_kept_attention_dropout_does_not_shift_residual_dropout(monkeypatch):
    """Selective does not run the attention again, so its draws are missing from the recomputation's generator."""

    def attention(q, k, v, spec: AttentionSpec, **_):
        return noisy_attention(v.repeat_interleave(q.shape[-2] // v.shape[-2], -2))

    monkeypatch.setattr(layers, "attention", attention)
    monkeypatch.setattr(recompute, "KEPT_OPERATORS", frozenset({"flash_train_tests::noisy_attention"}))
    options = {"attention_dropout": 0.2, "residual_dropout": 0.2}
    with Calls("flash_train_tests::noisy_attention") as calls:
        got = loss_and_gradients("selective", **options)
    assert calls.count == 2  # kept: once per layer
    for a, b in zip(got, loss_and_gradients("none", **options), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("operator", sorted(recompute.KEPT_OPERATORS))
def test_kept_operators_exist(operator):
    """A name that PyTorch or this project no longer has would make selective recompute everything, silently."""
    import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn

    namespace, name = operator.split("::")
    assert getattr(getattr(torch.ops, namespace), name).default.name() == operator


def test_selective_and_checkpoint_keep_less():
    def kept_bytes(mode: str) -> int:
        model = tiny_model(memory=mode, n_layers=4)
        tokens, labels = random_batch((1, 512), 96)
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = model.loss(tokens, labels)
        del loss
        return sum(held.values())

    assert kept_bytes("checkpoint") < kept_bytes("none") / 2
    assert kept_bytes("selective") < kept_bytes("none") / 2


def test_unknown_memory_mode_is_refused():
    with pytest.raises(ValueError, match=r"memory='some': must be one of none, selective, checkpoint"):
        Transformer(tiny_config(), memory="some")
    assert MEMORY_MODES == ("none", "selective", "checkpoint")
