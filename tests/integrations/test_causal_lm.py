"""`CausalLMModule` trains a model of transformers: the loss is the model's own, and a run resumes bit for bit."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.attention import Packing  # noqa: E402
from flash_train.integrations.causal_lm import CausalLM  # noqa: E402
from flash_train.training import CausalLMModule, OptimizerConfig  # noqa: E402
from tests.integrations.test_transformers import MODELS, SHAPE  # noqa: E402
from tests.support.training.tiny_run import TinyData, packed_row, read_metrics, tiny_trainer  # noqa: E402

NAMES = ["LlamaConfig", "Qwen3Config", "Gemma2Config", "Gemma3TextConfig"]


def model_of(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SHAPE, **MODELS[name], "vocab_size": 31, **changes})
    return CausalLM(AutoModelForCausalLM.from_config(config))


def batch_with_packing(index):
    row = packed_row(index)
    return row, Packing(row["cu_seqlens"], row["cu_seqlens"], lengths=row["lengths"])


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_sum_of_the_documents_losses(name):
    model = model_of(name).eval()
    eager = AutoModelForCausalLM.from_config(model.model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.model.state_dict())
    row, packing = batch_with_packing(3)
    total, count = model.loss(row["tokens"], row["labels"], positions=row["positions"], packing=packing)
    expected = torch.zeros(())
    for tokens, labels in zip(
        row["tokens"].split(row["lengths"], 1), row["labels"].split(row["lengths"], 1), strict=True
    ):
        logits = eager(tokens, use_cache=False).logits[0]
        expected = expected + torch.nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
    assert count == (row["labels"] != -100).sum()
    logits = model(row["tokens"], positions=row["positions"], packing=packing)
    assert logits.shape == (1, 32, 31)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_bit_for_bit(name, tmp_path):
    def train(folder, checkpoint=None, **options):
        module = CausalLMModule(model_of(name, attention_dropout=0.1), OptimizerConfig(lr=1e-2, warmup_steps=2))
        tiny_trainer(folder, max_steps=6, **options).fit(module, datamodule=TinyData(), ckpt_path=checkpoint)
        return module

    through = train(tmp_path / "through")
    train(tmp_path / "parts", stop_after=3)
    resumed = train(tmp_path / "parts", tmp_path / "parts" / "checkpoints" / "step-000003.ckpt")
    for a, b in zip(through.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [[row["train/loss"] for row in read_metrics(tmp_path / run)] for run in ("through", "parts")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_flops_are_those_of_our_own_model():
    from flash_train.model import ModelConfig, Transformer

    own = Transformer(ModelConfig(31, n_layers=3, width=32, n_heads=4, n_kv_heads=2, head_dim=8, mlp_width=48,
                                  tied_embeddings=False))  # fmt: skip
    model = model_of("LlamaConfig")
    for tokens, pairs in ((1, 0), (0, 1), (100, 1275)):
        assert model.model_flops(tokens, pairs) == own.model_flops(tokens, pairs)
    assert model_of("LlamaConfig", tie_word_embeddings=True).model_flops(1, 0) == own.model_flops(1, 0)
    windowed = model_of("MistralConfig")
    assert windowed.model_flops(100, 5050) - windowed.model_flops(100, 0) == 12 * 3 * 4 * 8 * 500
    experts = model_of("GptOssConfig")
    linear = sum(layer.weight.numel() for layer in experts.modules() if isinstance(layer, torch.nn.Linear))
    routed = sum(weight.numel() for weight in experts.parameters() if weight.dim() == 3) // 2  # 2 of 4 experts
    router = experts.model_flops(1, 0) // 6 - linear - routed
    assert 0 <= router <= 3 * 4 * 32
    assert len(model.blocks) == 3


def test_blocks_can_be_compiled():
    module = CausalLMModule(model_of("LlamaConfig"), OptimizerConfig(lr=1e-2, warmup_steps=2), compile=True)
    assert all(block._compiled_call_impl is not None for block in module.model.blocks)


def test_the_heads_bias_counts():
    torch.manual_seed(0)
    given = AutoModelForCausalLM.from_config(transformers.PhiConfig(**{**SHAPE, "vocab_size": 31})).eval()
    torch.nn.init.normal_(given.get_output_embeddings().bias)
    model, tokens = CausalLM(given), torch.randint(31, (1, 16))
    expected = torch.nn.functional.cross_entropy(given(tokens).logits[0], tokens[0], reduction="sum")
    torch.testing.assert_close(model.loss(tokens, tokens)[0], expected, rtol=1e-5, atol=1e-4)


def test_adapters_are_trained():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of("LlamaConfig").model, peft.LoraConfig(init_lora_weights=False))
    model, (row, packing) = CausalLM(adapted), batch_with_packing(3)
    loss, count = model.loss(row["tokens"], row["labels"], positions=row["positions"], packing=packing)
    logits = model(row["tokens"], positions=row["positions"], packing=packing)
    expected = torch.nn.functional.cross_entropy(logits[0], row["labels"][0], reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    loss.backward()
    assert (
        all((p.grad is not None) == ("lora" in name) for name, p in model.named_parameters()) and len(model.blocks) == 3
    )


def test_models_that_it_cannot_train():
    for wrong in ("gpt2", transformers.BertModel(transformers.BertConfig(**SHAPE))):
        with pytest.raises(TypeError, match="model must be a causal language model, as AutoModelForCausalLM returns"):
            CausalLM(wrong)
    bloom = transformers.BloomConfig(vocab_size=31, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="BloomForCausalLM has attention of its own, which CausalLM cannot replace"):
        CausalLM(AutoModelForCausalLM.from_config(bloom))
    peft = pytest.importorskip("peft")
    options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PrefixTuningConfig: CausalLM trains adapters, but no prompts"):
        CausalLM(peft.get_peft_model(model_of("LlamaConfig").model, options))
