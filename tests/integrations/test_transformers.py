"""Models of transformers compute the same with this project's attention as with `eager`."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.integrations import transformers as adapter  # noqa: E402
from flash_train.integrations.transformers import register  # noqa: E402
from tests.support.transformers_models import MODELS, SHAPE, TOLERANCE, assert_same, pair, random_tokens, with_both  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_padded_batches(name, side):
    tokens, mask = random_tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
    if side != "none":
        for row, padding in enumerate((0, 4, 9)):
            mask[row, slice(0, padding) if side == "left" else slice(17 - padding, 17)] = 0
    assert_same(name, tokens, mask, attention_mask=mask)


@pytest.mark.parametrize("name", MODELS)
def test_rows_packed_by_position_ids(name):
    """`eager` computes each document by itself: for some models it does not keep packed ones apart."""
    tokens, lengths = random_tokens(1, 24), (3, 14, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert_same(name, tokens, torch.ones(1, 24), lengths, position_ids=positions)


def test_rows_packed_by_boundaries():
    """`eager` does not know them, so each document is computed by itself."""
    eager, ours = pair("LlamaConfig")
    tokens, lengths = random_tokens(1, 24), (3, 14, 7)
    boundaries = torch.tensor([0, 3, 17, 24])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": 14, "max_length_k": 14}
    found = ours(tokens, position_ids=positions, use_cache=False, **given).logits
    expected = [eager(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(expected, 1), **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache):
    tokens, mask = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    eager, ours = (
        model.generate(tokens, attention_mask=mask, **options, pad_token_id=0, output_logits=True,
                       return_dict_in_generate=True)
        for model in pair(name)
    )  # fmt: skip
    assert torch.equal(eager.sequences, ours.sequences)
    for a, b in zip(ours.logits, eager.logits, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpointing(dropout):
    """Recomputes the same, dropout included, and dropout drops something."""
    config = transformers.LlamaConfig(**SHAPE, attention_dropout=dropout)
    tokens, positions = random_tokens(1, 24), torch.cat([torch.arange(n) for n in (3, 14, 7)])[None]
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=register()).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        logits = model(tokens, position_ids=positions, use_cache=False).logits
        logits.square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    evaluated = model.eval()(tokens, position_ids=positions, use_cache=False).logits
    assert torch.allclose(evaluated, logits, atol=1e-6) is (dropout == 0)


@pytest.mark.slow
def test_a_compiled_model():
    eager, ours = pair("LlamaConfig")
    compiled, tokens = torch.compile(ours), random_tokens(2, 24)
    positions = torch.cat([torch.arange(n) for n in (3, 14, 7)])[None]
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :4] = 0
    for inputs in ({"position_ids": positions}, {"attention_mask": mask}):
        counts = inputs.get("attention_mask", torch.ones(2, 24))[..., None]
        given = tokens[: len(inputs.get("position_ids", tokens))]
        found, expected = (model(given, use_cache=False, **inputs).logits for model in (compiled, eager))
        torch.testing.assert_close(found * counts[: len(given)], expected * counts[: len(given)], **TOLERANCE)


def test_attention_is_ours(monkeypatch):
    _, ours = pair("LlamaConfig")
    calls = []
    plain = adapter.attention
    monkeypatch.setattr(adapter, "attention", lambda *a, **o: calls.append(o.get("packing")) or plain(*a, **o))
    ours(random_tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    assert len(calls) == 3 and all(packing is calls[0] and packing.lengths == (3, 3) for packing in calls)


def test_packing_is_found_again_when_positions_change():
    _, ours = pair("LlamaConfig")
    tokens, positions = random_tokens(1, 8), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    first = ours(tokens, position_ids=positions, use_cache=False).logits
    positions.copy_(torch.arange(8)[None])
    second = ours(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(second, ours(tokens, use_cache=False).logits)
    assert not torch.allclose(first, second)


BART = transformers.BartConfig(
    vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3,
)  # fmt: skip


@pytest.fixture(scope="module")
def barts():
    """An encoder and decoder with `eager`, and with ours."""
    torch.manual_seed(0)
    return with_both(transformers.BartForConditionalGeneration._from_config, BART)


@pytest.mark.parametrize("padded", ["none", "ones", "left", "right"])
@pytest.mark.parametrize(("source", "target"), [(12, 7), (12, 12), (6, 12)])
def test_cross_attention(barts, padded, source, target):
    """The keys are another model's: their padding says nothing about the queries."""
    mask = torch.ones(2, source, dtype=torch.long)
    if padded in ("left", "right"):
        mask[1, slice(0, 4) if padded == "left" else slice(source - 4, source)] = 0
    given = {"input_ids": random_tokens(2, source), "decoder_input_ids": random_tokens(2, target)}
    given |= {} if padded == "none" else {"attention_mask": mask}
    eager, ours = (model(**given).logits for model in barts)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-3)


def test_generation_with_cross_attention(barts):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    eager, ours = (model.generate(random_tokens(2, 12), **options) for model in barts)
    assert torch.equal(eager, ours)


@pytest.mark.parametrize("given", ["position_ids", "hole", "counted hole"])
def test_packed_rows_with_padding(given):
    """Documents begin where positions do not go up by 1, or by the padding in between."""
    eager, ours = pair("LlamaConfig")
    tokens, mask = random_tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    if given == "position_ids":
        documents = [(0, slice(0, 5)), (0, slice(5, 10)), (1, slice(0, 3)), (1, slice(3, 12))]
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
        mask[0, 10:] = 0
        found = ours(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, part in documents:
            expected = eager(tokens[row : row + 1, part], use_cache=False).logits
            torch.testing.assert_close(found[row : row + 1, part], expected, **TOLERANCE)
        return
    mask[0, 4:6] = 0
    positions = torch.arange(12).expand(2, -1) if given == "hole" else (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    found, expected = (
        model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits for model in (ours, eager)
    )
    torch.testing.assert_close(found * mask[..., None], expected * mask[..., None], **TOLERANCE)


def packed_positions(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


KEEPS_POSITIONS = {
    "GPTBigCodeConfig": {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64},
    "PersimmonConfig": {**SHAPE, "num_key_value_heads": 4},
    "MoshiConfig": {**SHAPE, "ffn_dim": 48, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", KEEPS_POSITIONS)
@pytest.mark.parametrize("given", ["position_ids", "also boundaries"])
def test_packed_rows_of_models_that_do_not_give_positions_to_attention(name, given):
    config = getattr(transformers, name)(**{"initializer_range": 0.2, **KEEPS_POSITIONS[name]})
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, attn_implementation=register()).eval()
    tokens, lengths = random_tokens(2, 12), (5, 1, 6)
    boundaries = torch.tensor([0, 5, 6, 12, 17, 18, 24])
    extra = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries} if given == "also boundaries" else {}
    found = ours(tokens, position_ids=packed_positions(*lengths), use_cache=False, **extra).logits
    expected = [ours(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(expected, 1), **TOLERANCE)


def test_documents_without_positions():
    documents = torch.tensor([[[0, 0, 1, 2, 2]], [[0, 0, 0, 0, 0]]])
    assert adapter.packing_of_documents(documents[:, 0]).cu_seqlens_q.tolist() == [0, 2, 3, 5, 10]
    assert adapter.packing_of_documents(documents[1]) is None
    one = torch.randn(2, 4, 6, 8)
    with pytest.raises(ValueError, match=r"attention_mask.shape\[2\]=5: must be 6 queries and 6 keys, since it holds"):
        adapter.attention_forward(torch.nn.Module(), one, one, one, documents)


def test_inference_mode():
    _, ours = pair("LlamaConfig")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = ours(random_tokens(2, 9), attention_mask=mask).logits
    with torch.inference_mode():
        tokens, mask = random_tokens(2, 9), mask.clone()
        assert torch.equal(ours(tokens, attention_mask=mask).logits, expected)
        packed = ours(tokens, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
        assert packed.logits.isfinite().all()


def test_mistakes():
    with pytest.raises(ValueError, match="must not be empty or contain 'flash'"):
        register("flash_train")
    with pytest.raises(ValueError, match="backend='fast': must be one of"):
        register(backend="fast")
    _, ours = pair("LlamaConfig")
    with pytest.raises(ValueError, match="four dimensions need attn_implementation='sdpa'"):
        ours(random_tokens(1, 4), attention_mask=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"attention_mask.shape\[0\]=1: must be 2, as in the batch"):
        ours(random_tokens(2, 12), attention_mask=torch.ones(1, 12))
    mask, boundaries = torch.ones(1, 6), torch.tensor([0, 2, 6])
    mask[0, 5:] = 0
    with pytest.raises(ValueError, match="attention_mask and cu_seq_lens_q: only one can say where the tokens are"):
        ours(random_tokens(1, 6), attention_mask=mask, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries)
