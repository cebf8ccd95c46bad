"""The decoder: separate documents, loss, precision, FLOPs, and compilation."""

import math

import pytest
import torch
import torch.nn.functional as F

from flash_train.attention import attended_pairs
from flash_train.model import ModelConfig, RopeScaling, Transformer
from tests.support.attention.fake_family import registered
from tests.support.model.tiny import packing_of, positions_of, random_batch, tiny_config, tiny_model

LENGTHS = (20, 1, 11, 32)  # the second row starts where the fourth document does
SHAPE = (2, 32)
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]


@pytest.mark.parametrize("attention", ["sdpa", "standard"])
@pytest.mark.parametrize("document", range(len(LENGTHS)))
def test_changing_a_document_leaves_the_logits_of_the_others_bitwise_equal(document, attention):
    model = tiny_model(attention=attention, qk_norm=True).eval()
    tokens, _ = random_batch(SHAPE, 96)
    changed = tokens.clone().view(-1)
    span = slice(STARTS[document], STARTS[document] + LENGTHS[document])
    changed[span] = (changed[span] + 7) % 96
    with torch.no_grad():
        before, after = (model(t.view(SHAPE), packing=packing_of(LENGTHS)).flatten(0, 1) for t in (tokens, changed))
    others = torch.ones(len(before), dtype=torch.bool)
    others[span] = False
    assert torch.equal(before[others], after[others])
    assert (before[span] != after[span]).any(-1).all()


def test_the_backend_is_checked_when_the_model_is_built():
    with registered():
        assert tiny_model(attention="fake").attention == "fake"
    with pytest.raises(ValueError, match="^attention='fake': must be one of auto, flash, "):
        tiny_model(attention="fake")


def test_packed_documents_have_the_logits_of_single_documents():
    model = tiny_model().double().eval()
    tokens, labels = random_batch(SHAPE, 96)
    packed = model(tokens, packing=packing_of(LENGTHS)).flatten(0, 1)
    alone = [model(part[None])[0] for part in tokens.view(-1).split(LENGTHS)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)
    loss, count = model.loss(tokens, labels, packing=packing_of(LENGTHS))
    documents = zip(*(t.view(-1).split(LENGTHS) for t in (tokens, labels)), strict=True)
    parts = [model.loss(document[None], targets[None]) for document, targets in documents]
    torch.testing.assert_close(loss, sum(p[0] for p in parts), rtol=1e-10, atol=0)
    assert count == sum(p[1] for p in parts) == (labels != -100).sum()


@pytest.mark.parametrize("packed", [False, True])
def test_default_positions_restart_at_each_document(packed):
    model = tiny_model().eval()
    tokens, _ = random_batch(SHAPE, 96)
    packing = packing_of(LENGTHS) if packed else None
    positions = positions_of(LENGTHS if packed else (32, 32), SHAPE)
    derived = model.hidden(tokens, packing=packing)
    assert torch.equal(derived, model.hidden(tokens, positions=positions, packing=packing))
    assert not torch.equal(derived, model.hidden(tokens, positions=positions * 2, packing=packing))


def test_logits_are_causal():
    model = tiny_model().eval()
    tokens, _ = random_batch((1, 32), 96)
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 96
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:20], after[:20])
    assert (before[20:] != after[20:]).any(-1).all()


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_logits(tied):
    model = tiny_model(tied_embeddings=tied)
    tokens, labels = random_batch(SHAPE, 96)
    loss, count = model.loss(tokens, labels)
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert loss.dtype == torch.float32 and loss.dim() == 0
    assert count.dtype == torch.int64 and count == (labels != -100).sum()
    got = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(got, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_shapes_that_do_not_fit_are_named():
    """Labels of the transposed shape would be compared with the logits of other tokens."""
    model = tiny_model()
    tokens, labels = random_batch((2, 8), 96)
    for wrong in (labels.T, labels[:, 1:], labels[:1]):
        with pytest.raises(ValueError, match=r"^labels has shape \(\d, \d\): must be \(2, 8\), as tokens$"):
            model.loss(tokens, wrong)
    with pytest.raises(ValueError, match=r"^positions has shape \(8,\): must be \(2, 8\), as tokens$"):
        model(tokens, positions=torch.arange(8))
    for wrong in (tokens[0], tokens[:, :0], tokens[:0], tokens[None]):
        with pytest.raises(ValueError, match=r"^tokens has shape \(.*\): must be \(batch, seq\), both 1 or more$"):
            model(wrong)


def gradients(model: Transformer, dtype: torch.dtype, autocast: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and all gradients of the mean loss, in fp64."""
    model = model.to(dtype)
    tokens, labels = random_batch(SHAPE, 96)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens, packing=packing_of(LENGTHS)).detach().double()
        loss, count = model.loss(tokens, labels, packing=packing_of(LENGTHS))
    (loss / count).backward()
    return logits, torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 2e-5), (torch.bfloat16, False, 5e-2), (torch.float32, True, 5e-2)],
    ids=["fp32", "bf16-true", "bf16-mixed"],
)
def test_lower_precisions_stay_near_fp64(dtype, autocast, tolerance, qk_norm):
    """Relative to the largest magnitude; 5e-2 is some ten roundings of bf16 (2^-8) through the layers."""
    exact_logits, exact_gradients = gradients(tiny_model(qk_norm=qk_norm), torch.float64)
    logits, grads = gradients(tiny_model(qk_norm=qk_norm), dtype, autocast)
    for got, exact in ((logits, exact_logits), (grads, exact_gradients)):
        assert (got - exact).abs().max() <= tolerance * exact.abs().max()
        assert (got - exact).norm() <= tolerance * exact.norm()


def test_under_autocast_activations_are_bf16_and_gradients_fp32():
    model = tiny_model()
    tokens, labels = random_batch(SHAPE, 96)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.loss(tokens, labels)
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_initial_weights_have_the_stated_spread_and_initial_loss_is_near_uniform():
    config = tiny_config(width=100, mlp_width=256, head_dim=32, n_layers=8, vocab_size=512)
    torch.manual_seed(0)
    model = Transformer(config)
    for module in (model.head, model.blocks[0].mlp.gate, model.blocks[0].attention.q):
        assert module.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert model.embedding.weight.std().item() == pytest.approx(1, rel=0.05)
    tied = Transformer(tiny_config(width=100, head_dim=32, vocab_size=512, tied_embeddings=True))
    assert tied.embedding.weight.std().item() == pytest.approx(0.1, rel=0.05)
    for module in (model.blocks[3].attention.out, model.blocks[3].mlp.down):
        assert module.weight.std().item() == pytest.approx(0.1 / 4, rel=0.05)
    tokens, labels = random_batch((2, 64), 512)
    loss, count = model.loss(tokens, labels)
    assert math.log(512) < (loss / count).item() < math.log(512) + 1  # logits of unit variance cost half a nat


def test_model_learns_to_copy():
    """End to end: fifty steps on one batch bring its loss almost to 0."""
    torch.manual_seed(0)
    model = Transformer(tiny_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, labels = random_batch((2, 16), 96)
    for _ in range(50):
        loss, count = model.loss(tokens, labels)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert (loss / count).item() < 0.1


def test_tied_weights_are_one_parameter():
    model = tiny_model(tied_embeddings=True)
    assert model.head is None and model.head_weight is model.embedding.weight
    assert not any("head" in name for name in model.state_dict())


def test_flops_equal_a_count_by_hand():
    config = ModelConfig(
        vocab_size=10, n_layers=3, width=8, n_heads=4, n_kv_heads=2, head_dim=6, mlp_width=20, tied_embeddings=True
    )
    per_layer = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 20  # q, k and v, out, the MLP's three
    pairs = attended_pairs((5, 3))
    expected = 6 * (3 * per_layer + 10 * 8) * 8 + 12 * 3 * 4 * 6 * pairs
    with torch.device("meta"):
        assert Transformer(config).model_flops(8, pairs) == expected


def test_model_runs_with_every_rope_rule():
    tokens, _ = random_batch((1, 24), 96)
    results = [
        tiny_model(rope_scaling=scaling).eval()(tokens)
        for scaling in (
            None,
            RopeScaling("linear", 2.0),
            RopeScaling("ntk", 2.0),
            RopeScaling("yarn", 2.0, 16),
            RopeScaling("llama3", 2.0, 16),
        )
    ]
    assert all(r.isfinite().all() for r in results)
    for i, a in enumerate(results):
        assert not any(torch.equal(a, b) for b in results[:i])


def test_a_block_compiles_without_a_graph_break():
    model = tiny_model(residual_dropout=0.1, qk_norm=True)
    x, tables = torch.randn(64, 48), (torch.rand(64, 8), torch.rand(64, 8))
    arguments = (x, *tables, packing_of(LENGTHS), 2)
    compiled = torch.compile(model.blocks[0], backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    got = compiled(*arguments)
    torch.manual_seed(0)
    torch.testing.assert_close(got, model.blocks[0](*arguments))


@pytest.mark.parametrize("memory", ["none", "selective"])
def test_compiled_model_has_the_gradients_of_the_plain_one(memory):
    tokens, labels = random_batch(SHAPE, 96)
    results = []
    for compiled in (False, True):
        model = tiny_model(memory=memory, n_layers=1)
        loss_of = torch.compile(model.loss, backend="aot_eager") if compiled else model.loss
        loss, count = loss_of(tokens, labels, positions=positions_of(LENGTHS, SHAPE), packing=packing_of(LENGTHS))
        (loss / count).backward()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*results)
