"""Small models of transformers, with `eager` and with this project's attention."""

import copy

import torch
import transformers
from transformers import AutoModelForCausalLM

from flash_train.integrations.transformers import register

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
