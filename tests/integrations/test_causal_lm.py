"""`CausalLMModule` trains a model of transformers: the loss is the model's own, and a run resumes bit for bit."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from flash_train.attention import Packing  # noqa: E402
from flash_train.integrations import causal_lm  # noqa: E402
from flash_train.integrations.causal_lm import CausalLM  # noqa: E402
from flash_train.training import CausalLMModule, OptimizerConfig  # noqa: E402
from tests.support.training.tiny_run import TinyData, packed_row, read_metrics, tiny_trainer  # noqa: E402
from tests.support.transformers_models import MODELS, SHAPE  # noqa: E402

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
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(model.model.config), attn_implementation="eager").eval()
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


STATEFUL = {
    "MambaConfig": {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4},
    "JambaConfig": {**SHAPE, "mamba_d_state": 4, "num_experts": 2, "use_mamba_kernels": False},
    "RecurrentGemmaConfig": {**SHAPE, "head_dim": 8, "lru_width": 32, "logits_soft_cap": 3.0},
    "Lfm2Config": {**SHAPE, "layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3NextConfig": {**SHAPE, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
                        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "FalconH1Config": {**SHAPE, "head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                       "mamba_d_state": 4},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", STATEFUL)
def test_models_whose_state_passes_to_the_next_document(name, device):
    config = getattr(transformers, name)(**{**STATEFUL[name], "vocab_size": 31})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="ForCausalLM has layers .*: CausalLM takes models with attention only"):
        CausalLM(model)


@pytest.mark.parametrize("name", ["MambaConfig", "JambaConfig", "RecurrentGemmaConfig", "Qwen3NextConfig"])
def test_documents_that_change_each_other_are_found_by_their_values(name, monkeypatch):
    monkeypatch.setattr(causal_lm, "check_attention_only", lambda model: None)
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**STATEFUL[name], "vocab_size": 31})
    with pytest.raises(ValueError, match="ForCausalLM computes a packed document otherwise than by itself: CausalLM"):
        CausalLM(AutoModelForCausalLM.from_config(config))


def test_a_model_that_counts_positions_through_the_row():
    bart = transformers.BartConfig(vocab_size=31, d_model=32, decoder_layers=1, decoder_attention_heads=4,
                                   decoder_ffn_dim=48, init_std=0.3)  # fmt: skip
    with pytest.raises(ValueError, match="BartForCausalLM computes a packed document otherwise than by itself"):
        CausalLM(AutoModelForCausalLM.from_config(bart))


def test_the_check_leaves_the_model_as_it_was():
    config = transformers.LlamaConfig(**{**SHAPE, "vocab_size": 31, "attention_dropout": 0.5})
    given = AutoModelForCausalLM.from_config(config).train()
    given.model.layers[1].eval()
    modes = [module.training for module in given.modules()]
    tensors = {name: tensor.clone() for name, tensor in [*given.named_parameters(), *given.named_buffers()]}
    state = torch.get_rng_state()
    CausalLM(given)
    assert modes == [module.training for module in given.modules()]
    assert torch.equal(state, torch.get_rng_state())
    found = dict([*given.named_parameters(), *given.named_buffers()])
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(p.grad is None and p.requires_grad for p in given.parameters())


def test_weights_that_cannot_run_are_not_checked(caplog):
    with torch.device("meta"):
        given = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    CausalLM(given)
    assert "not checked that packed documents are kept apart, since its weights have no values yet" in caplog.text
    mixed = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    mixed.model.norm.bfloat16()
    CausalLM(mixed)
    assert "since its weights have several dtypes or devices" in caplog.text


def test_the_cap_of_logits_counts(monkeypatch):
    """Only models with a state have this setting."""
    for check in ("check_attention_only", "check_documents_apart"):
        monkeypatch.setattr(causal_lm, check, lambda model: None)
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(**{**STATEFUL["RecurrentGemmaConfig"], "vocab_size": 31})
    model, tokens = CausalLM(AutoModelForCausalLM.from_config(config).eval()), torch.randint(31, (1, 16))
    expected = torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0], reduction="sum")
    torch.testing.assert_close(model.loss(tokens, tokens)[0], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["GPT2Config", "GPTBigCodeConfig"])
def test_positions_come_from_the_packing(name):
    torch.manual_seed(0)
    config = getattr(transformers, name)(vocab_size=31, n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=64)
    model, (row, packing) = CausalLM(AutoModelForCausalLM.from_config(config).eval()), batch_with_packing(3)
    given = model(row["tokens"], positions=row["positions"], packing=packing)
    assert torch.equal(model(row["tokens"], packing=packing), given)
    apart = torch.cat([model(part) for part in row["tokens"].split(row["lengths"], 1)], 1)
    torch.testing.assert_close(given, apart, rtol=1e-4, atol=1e-5)
    losses = [model.loss(row["tokens"], row["labels"], positions=p, packing=packing) for p in (row["positions"], None)]
    assert torch.equal(losses[0][0], losses[1][0])


def test_models_that_it_cannot_train():
    for wrong in ("gpt2", transformers.BertModel(transformers.BertConfig(**SHAPE))):
        with pytest.raises(TypeError, match="model must be a causal language model, as AutoModelForCausalLM returns"):
            CausalLM(wrong)
    bloom = transformers.BloomConfig(vocab_size=31, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="BloomForCausalLM has attention of its own, which CausalLM cannot replace"):
        CausalLM(AutoModelForCausalLM.from_config(bloom))
    llama4 = transformers.Llama4TextConfig(**SHAPE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2)
    with pytest.raises(ValueError, match="Llama4ForCausalLM has no decoder named 'language_model': CausalLM takes"):
        CausalLM(AutoModelForCausalLM.from_config(llama4))
    peft = pytest.importorskip("peft")
    options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="PrefixTuningConfig: CausalLM trains adapters, but no prompts"):
        CausalLM(peft.get_peft_model(model_of("LlamaConfig").model, options))
