"""Masks of models of transformers: padding, windows, and those that are refused."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.integrations import transformers as adapter  # noqa: E402
from flash_train.integrations.transformers import register  # noqa: E402
from tests.support.transformers_models import SHAPE, TOLERANCE, pair, random_tokens, with_both  # noqa: E402


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
        ("SplinterModel", {}, "mask is not causal, and its layers do not say so"),
        ("ClapTextModel", {}, "mask is not causal, and its layers do not say so"),
        ("Aimv2TextModel", {"max_position_embeddings": 64}, "mask is causal, and its layers do not say so"),
        (
            "GemmaModel",
            {"head_dim": 8, "use_bidirectional_attention": True},
            "mask is causal, and its layers do not say so",
        ),
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
