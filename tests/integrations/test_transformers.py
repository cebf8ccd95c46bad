"""Models of transformers compute the same with this project's attention as with `eager`."""

import copy
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.integrations import transformers as adapter  # noqa: E402
from flash_train.integrations.transformers import register  # noqa: E402

SHAPE = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,  # with small weights attention is nearly uniform, whatever a token attends to
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
MODELS = {
    "LlamaConfig": {},
    "Qwen3Config": {"head_dim": 16},
    "MistralConfig": {"sliding_window": 5, "head_dim": 8},
    "Gemma2Config": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "Gemma3TextConfig": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "GptOssConfig": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3Config": {},
    "DeepseekV3Config": MLA,
}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def pair(name):
    """The same model with `eager` and with ours."""
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SHAPE, **MODELS[name]})
    return with_both(AutoModelForCausalLM.from_config, config)


def with_both(build, config):
    """A model of the configuration with `eager` and with ours; each has its own configuration, which names one."""
    eager, ours = (build(copy.deepcopy(config), attn_implementation=name).eval() for name in ("eager", register()))
    ours.load_state_dict(eager.state_dict())
    assert [model.config._attn_implementation for model in (eager, ours)] == ["eager", register()]
    return eager, ours


def run(model, tokens, weights, lengths=None, **inputs):
    """Logits, and the gradients of a weighted sum of the logits that count; with lengths, each document by itself."""
    model.zero_grad()
    parts = tokens.split(lengths, 1) if lengths else [tokens]
    logits = torch.cat([model(part, use_cache=False, **inputs).logits for part in parts], 1)
    (logits * weights).sum().backward()
    return logits.detach() * (weights != 0), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(name, tokens, counts, lengths=None, **inputs):
    eager, ours = pair(name)
    weights = torch.randn(*tokens.shape, 99, generator=torch.Generator().manual_seed(1)) * counts[..., None]
    expected = run(eager, tokens, weights, lengths, **({} if lengths else inputs))
    found = run(ours, tokens, weights, **inputs)
    torch.testing.assert_close(found[0], expected[0], **TOLERANCE)
    assert len(found[1]) == len(expected[1]) > 10
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)


def random_tokens(*shape):
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(0))


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


def test_padding_within_a_row_and_a_window():
    """Unpadding takes the padding away, which a window counts."""
    eager, ours = pair("MistralConfig")
    tokens, mask = random_tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:6] = 0
    with pytest.raises(ValueError, match="sliding_window=5 and attention_mask: a row must not have padding between"):
        ours(tokens, attention_mask=mask, use_cache=False)
    # a window that holds all keys, and padding between two documents
    found, expected = (model(tokens[:, 3:8], attention_mask=mask[:, 3:8]).logits for model in (ours, eager))
    counts = mask[:, 3:8, None]
    torch.testing.assert_close(found * counts, expected * counts, **TOLERANCE)
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5], [*range(12)]])
    found = ours(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    expected = [eager(tokens[:1, part], use_cache=False).logits for part in (slice(0, 4), slice(6, 12))]
    torch.testing.assert_close(found[:1, mask[0].bool()], torch.cat(expected, 1), **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_on_both_sides_of_padded_rows(side):
    models = []
    for attention in ("eager", register()):
        config = transformers.ModernBertConfig(
            vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            local_attention=6, pad_token_id=0, initializer_range=0.3,
        )  # fmt: skip
        torch.manual_seed(0)
        models.append(transformers.ModernBertModel._from_config(config, attn_implementation=attention).eval())
    tokens, mask = random_tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[1, slice(0, 9) if side == "left" else slice(15, 24)] = 0
    expected, found = (model(tokens, attention_mask=mask).last_hidden_state[mask.bool()] for model in models)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "Gemma2Config"])
def test_decoders_that_are_made_bidirectional(name, side):
    if 'config, "is_causal"' not in inspect.getsource(transformers.masking_utils.create_causal_mask):
        pytest.skip(f"transformers {transformers.__version__} has causal masks only for decoders")
    tokens, mask = random_tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    if side != "none":
        mask[1, slice(0, 7) if side == "left" else slice(13, 20)] = 0
    found = [model(tokens, attention_mask=mask, is_causal=False, use_cache=False).logits for model in pair(name)]
    torch.testing.assert_close(found[1][mask.bool()], found[0][mask.bool()], **TOLERANCE)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_an_encoder_whose_windows_do_not_count_the_query(side):
    part = {**SHAPE, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}
    config = transformers.T5GemmaConfig(
        encoder=part, decoder=part, vocab_size=99, decoder_start_token_id=1, initializer_range=0.2, dropout_rate=0.0
    )
    torch.manual_seed(0)
    models = with_both(transformers.T5GemmaForConditionalGeneration._from_config, config)
    mask = torch.ones(2, 20, dtype=torch.long)
    if side != "none":
        mask[1, slice(0, 7) if side == "left" else slice(13, 20)] = 0
    given = {"input_ids": random_tokens(2, 20), "attention_mask": mask, "decoder_input_ids": random_tokens(2, 12)}
    found = [model(**given, use_cache=False).logits for model in models]
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)


def test_a_window_that_no_layer_uses():
    found = []
    for attention in ("eager", register()):
        config = transformers.Qwen2MoeConfig(
            **SHAPE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=1
        )
        assert config.sliding_window == 0
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        found.append(model(random_tokens(2, 12), use_cache=False).logits)
    torch.testing.assert_close(*found, **TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
def test_masks_shorter_than_the_row(padded):
    _, ours = pair("LlamaConfig")
    mask = torch.ones(2, 8)
    mask[0, 0] = 0 if padded else 1
    message = r"attention_mask.shape\[1\]=8: must be 12, one for each token, or more with a cache"
    for cached in (False, True):
        with pytest.raises(ValueError, match=message):
            ours(random_tokens(2, 12), attention_mask=mask, use_cache=cached)
    x = torch.randn(2, 4, 12, 8)
    with pytest.raises(ValueError, match=message):
        adapter.attention_forward(torch.nn.Module(), x, x, x, mask.bool())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", ["LlamaConfig", "MistralConfig", "GptOssConfig"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("length", [12, 24])
def test_masks_longer_than_the_row(name, cache, length):
    """The mask of all tokens that there will be, for the first ones, and for one after them."""
    tokens, mask = random_tokens(2, 12), torch.ones(2, length, dtype=torch.long)
    mask[1, :4] = 0
    found = []
    for model in pair(name):
        kind = transformers.DynamicCache if cache == "dynamic" else transformers.StaticCache
        options = {"config": model.config, **({} if cache == "dynamic" else {"max_cache_len": 24})}
        keys, positions = kind(**options), (mask.cumsum(-1) - 1).clamp(min=0)
        parts = [slice(0, 8), slice(8, 9)]
        logits = [
            model(tokens[:, part], attention_mask=mask, position_ids=positions[:, part], past_key_values=keys).logits
            for part in parts
        ]
        found.append(torch.cat(logits, 1)[mask[:, :9].bool()])
    torch.testing.assert_close(found[1], found[0], **TOLERANCE)


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


def test_other_masks_and_scores_are_refused():
    """They would be left out without a word."""
    tokens = random_tokens(2, 12)
    llama4 = transformers.Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=4, num_local_experts=2
    )
    model = AutoModelForCausalLM.from_config(llama4, attn_implementation=register())
    with pytest.raises(NotImplementedError, match="this model's mask has chunks of 4 tokens, which only"):
        model(tokens)
    assert model(tokens[:, :4], use_cache=False).logits.isfinite().all()
    qwen = transformers.Qwen2MoeConfig(
        **SHAPE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=1,
        use_sliding_window=True, sliding_window=4, max_window_layers=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(qwen, attn_implementation=register())
    with pytest.raises(NotImplementedError, match="this model's mask has a window of 4 tokens, which only"):
        model(tokens)
    t5 = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = transformers.T5ForConditionalGeneration._from_config(t5, attn_implementation=register())
    with pytest.raises(
        NotImplementedError, match="attention has position_bias, which only|T5 has attention of its own"
    ):
        model(tokens, decoder_input_ids=tokens)
    bloom = transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    AutoModelForCausalLM.from_config(bloom, attn_implementation=register())
    with pytest.raises(NotImplementedError, match="Bloom has attention of its own"):
        adapter.padding_mask(2, 12, 12, config=bloom)  # in 5.0 Bloom makes its own mask, too


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("SplinterModel", {}, r"an order \(is_causal=False\) of which its layers do not know"),
        ("ClapTextModel", {}, r"an order \(is_causal=False\) of which its layers do not know"),
        ("Aimv2TextModel", {"max_position_embeddings": 64}, r"an order \(is_causal=True\) of which its layers"),
        ("GemmaModel", {"head_dim": 8, "use_bidirectional_attention": True}, r"an order \(is_causal=True\) of which"),
        ("DeepseekV4Model", {"n_routed_experts": 4, "moe_intermediate_size": 16}, "compressed keys"),
    ],
)
def test_masks_that_the_layers_do_not_know(name, config, message):
    """Their layers take the order of the tokens, or the number of keys, from masks with four dimensions."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    shape = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = getattr(transformers, name).config_class(**shape, num_attention_heads=4, pad_token_id=0, **config)
    model = getattr(transformers, name)._from_config(config, attn_implementation=register())
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    with pytest.raises(NotImplementedError, match=message):
        model(random_tokens(2, 12), attention_mask=mask)


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
