"""Models of transformers in bf16 on a GPU: with this project's kernels they are as exact as with `eager`."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.integrations.transformers import register  # noqa: E402
from tests.support.transformers_models import MODELS, SHAPE  # noqa: E402

pytestmark = pytest.mark.gpu

WIDE = {
    **SHAPE,
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
# Heads of a size that Hopper's kernels take; all experts, since rounding changes which ones a token is sent to
CHANGES = {
    "MistralConfig": {"sliding_window": 50, "head_dim": 64},
    "GptOssConfig": {"num_experts_per_tok": 4, "sliding_window": 50},
    "DeepseekV3Config": {"num_experts_per_tok": 4, "topk_group": 2, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64},
}
LENGTHS = (30, 200, 70)


def models(name):
    """The same model in fp32 and in bf16 with `eager`, and in bf16 with our kernels."""
    shape = {**WIDE, **MODELS[name], **CHANGES.get(name, {})}
    if "head_dim" in shape:
        shape["head_dim"] = 64
    made = []
    for attention, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), (register(backend="flash"),) * 2):
        config = getattr(transformers, name)(**shape)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        dtype = torch.bfloat16 if dtype is attention else dtype
        made.append(model.to(torch.bfloat16).to("cuda", dtype))
    return made


def error(found, exact):
    return float((found.double() - exact.double()).square().mean().sqrt())


def assert_as_exact(exact, plain, found, factor):
    allowed = factor * error(plain, exact) + 1e-5 * float(exact.abs().max())
    assert error(found, exact) <= allowed, (error(found, exact), error(plain, exact))


def run(model, tokens, weights, lengths=None, **inputs):
    """Logits that count, and the gradients of their weighted sum; with lengths, each document by itself."""
    parts = tokens.split(lengths, 1) if lengths else [tokens]
    logits = torch.cat([model(part, use_cache=False, **inputs).logits for part in parts], 1).float()
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach() * (weights != 0), gradients


def check(name, tokens, counts, lengths=None, **inputs):
    weights = torch.randn(*tokens.shape, 99, generator=torch.Generator().manual_seed(1)).cuda() * counts[..., None]
    exact, plain, ours = models(name)
    right, same = (run(model, tokens, weights, lengths, **({} if lengths else inputs)) for model in (exact, plain))
    found = run(ours, tokens, weights, **inputs)
    assert_as_exact(right[0], same[0], found[0], 2)
    assert found[1].keys() == right[1].keys()
    for key, gradient in right[1].items():
        assert_as_exact(gradient, same[1][key], found[1][key], 3)


def random_tokens(*shape):
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(0)).cuda()


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows(name):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    check(name, random_tokens(1, 300), torch.ones(1, 300).cuda(), LENGTHS, position_ids=positions)


@pytest.mark.parametrize("name", MODELS)
def test_padded_batches(name):
    mask = torch.ones(3, 200, dtype=torch.long)
    mask[1, :40] = mask[2, :130] = 0
    check(name, random_tokens(3, 200), mask.cuda(), attention_mask=mask.cuda())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_generation(name):
    """Steps with a cache, all with the same next tokens."""
    tokens, mask = random_tokens(2, 140), torch.ones(2, 140, dtype=torch.long).cuda()
    mask[1, :40] = 0
    found = []
    for model in models(name):
        step = model(tokens[:, :130], attention_mask=mask[:, :130], use_cache=True)
        logits = [step.logits[:, -1:]]
        for i in range(130, 140):
            given = {"attention_mask": mask[:, : i + 1], "past_key_values": step.past_key_values}
            step = model(tokens[:, i : i + 1], **given, use_cache=True)
            logits.append(step.logits)
        found.append(torch.cat(logits, 1))
    assert_as_exact(*found, 2)
