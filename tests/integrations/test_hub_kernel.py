"""The folder of a kernel: `kernels` loads it, and a model of transformers computes with it as with `eager`."""

import copy

import pytest
import torch

from flash_train.attention import flash_attn_func, flash_attn_varlen_func
from flash_train.integrations.hub_kernel import write_kernel
from tests.support.redrawn import assert_within

kernels = pytest.importorskip("kernels")
transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 5, "head_dim": 8},
    "GptOssConfig": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}
REPOSITORY = "someone/fused-attention"
LENGTHS = (3, 14, 7)


def test_kernels_loads_the_folder(tmp_path):
    loaded = kernels.get_local_kernel(write_kernel(tmp_path / "kernel"))
    assert loaded.flash_attn_func is flash_attn_func and loaded.flash_attn_varlen_func is flash_attn_varlen_func
    assert set(loaded.__all__) == {"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"}
    assert loaded.__file__.startswith(str(tmp_path))


def test_a_version_below_1_is_refused(tmp_path):
    with pytest.raises(ValueError, match="version=0: must be an integer of at least 1"):
        write_kernel(tmp_path, version=0)


@pytest.fixture
def on_the_hub(tmp_path, monkeypatch):
    """The kernel's name as if it were on the hub: `kernels` takes the folder in its place."""
    from transformers.utils.import_utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} does not take kernels {kernels.__version__}")
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={write_kernel(tmp_path / 'kernel')}")
    return REPOSITORY


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["rows", "padded", "packed"])
def test_a_model_with_the_kernel(name, layout, on_the_hub):
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SHAPE, **MODELS[name]})
    config._experts_implementation = "eager"  # the grouped one takes no fp64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in (p for name, p in model.named_parameters() if name.endswith("sinks")):
        torch.nn.init.normal_(parameter)
    tokens, counts, inputs = torch.randint(3, 61, (2, 24)), torch.ones(2, 24), {}
    if layout == "padded":
        counts[1, 20:] = 0  # shorter than the windows: every query attends to a token
        inputs = {"attention_mask": counts.long()}
    elif layout == "packed":
        tokens, counts = tokens[:1], counts[:1]
        inputs = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    weights = torch.randn(*tokens.shape, 61) * counts[..., None]

    def run(model):
        if layout == "packed" and model is not ours:  # gpt-oss with eager attends to other documents
            logits = torch.cat([model(part, use_cache=False).logits for part in tokens.split(LENGTHS, 1)], 1)
        else:
            logits = model(tokens, use_cache=False, **inputs).logits * counts[..., None]
        return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), list(model.parameters()))]

    ours = copy.deepcopy(model)
    ours.set_attn_implementation(on_the_hub, allow_all_kernels=True)
    assert_within(run(ours), model, lambda eager, dtype: run(eager.to(dtype)), torch.float32)
