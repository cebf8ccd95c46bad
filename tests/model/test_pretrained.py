"""Reading and writing models in the Llama layout, compared with transformers."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from flash_train.model import PretrainedSource, RopeScaling, Transformer, load_pretrained, save_pretrained
from tests.support.model.tiny import packing_of, random_batch, tiny_config, tiny_model

SCALINGS = {
    "plain": None,
    "linear": RopeScaling("linear", 4.0),
    "ntk": RopeScaling("ntk", 4.0),
    "yarn": RopeScaling("yarn", 4.0, 16),
    "llama3": RopeScaling("llama3", 8.0, 32),
}


def llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | overrides))).eval()


def ours(path) -> Transformer:
    config, state = load_pretrained(path)
    model = Transformer(config, attention="sdpa").eval()
    model.load_state_dict(state)
    return model


def edit_config(path, **changes) -> None:
    values = json.loads((path / "config.json").read_text())
    values = {k: v for k, v in (values | changes).items() if v != "remove"}
    (path / "config.json").write_text(json.dumps(values))


@torch.no_grad()
def assert_same_logits(a, b) -> None:
    tokens, _ = random_batch((2, 40), 96)
    first, second = (m(tokens) if isinstance(m, Transformer) else m(tokens).logits for m in (a, b))
    assert first.std() > 0.1
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        {"head_dim": 24},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=["gqa", "tied", "mha", "wide-heads", "theta", "llama3", "yarn"],
)
def test_models_written_by_transformers_are_read(tmp_path, overrides):
    theirs = llama(**overrides)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(ours(tmp_path), theirs)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_saved_models_are_read_by_transformers(tmp_path, scaling, tied):
    model = tiny_model(rope_scaling=scaling, tied_embeddings=tied, width=64, n_kv_heads=1).eval()
    assert save_pretrained(model, model.config, tmp_path / "out", token_ids={"eos_token_id": 7}) == tmp_path / "out"
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.config.eos_token_id == 7 and theirs.config.bos_token_id is None
    assert_same_logits(model, theirs.eval())


def test_saved_model_round_trips(tmp_path):
    model = tiny_model(rope_scaling=SCALINGS["llama3"], width=64)
    save_pretrained(model.state_dict(), model.config, tmp_path / "again")
    config, state = load_pretrained(tmp_path / "again")
    assert config == tiny_config(rope_scaling=SCALINGS["llama3"], width=64, name="again")
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_saved_model_keeps_its_dtype(tmp_path):
    model = tiny_model(width=64).bfloat16()
    save_pretrained(model, model.config, tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert {t.dtype for t in load_pretrained(tmp_path)[1].values()} == {torch.bfloat16}


def test_a_full_disk_is_a_system_error(tmp_path):
    """`safetensors` has an error class of its own for it."""
    resource = pytest.importorskip("resource")  # Windows has none
    model = tiny_model(width=64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors not written: .*File too large"):
            save_pretrained(model, model.config, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", ["ours", "theirs"])
def test_sharded_weights_are_read(tmp_path, writer):
    if writer == "ours":
        model = tiny_model(width=64).eval()
        save_pretrained(model, model.config, tmp_path, max_shard_bytes=40_000)
    else:
        model = llama()
        model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert_same_logits(ours(tmp_path), model)
    assert_same_logits(LlamaForCausalLM.from_pretrained(tmp_path).eval(), model)


def test_saving_again_removes_old_shards(tmp_path):
    first, second = tiny_model(width=64, seed=0), tiny_model(width=64, seed=1)
    save_pretrained(first, first.config, tmp_path, max_shard_bytes=40_000)
    save_pretrained(second, second.config, tmp_path)  # one file now: the old shards must not be read again
    assert_same_logits(ours(tmp_path), second)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny_model(width=64)
    save_pretrained(model, model.config, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("flash_train.model.pretrained.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tiny_model(width=64, seed=1), model.config, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    """Otherwise a crash right after may leave a file that has its name but nothing in it."""
    synced, moved = set(), []

    def fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)

    def replace(temporary, file):
        assert os.stat(temporary).st_ino in synced
        moved.append(file.name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    model = tiny_model(width=64)
    save_pretrained(model, model.config, tmp_path)
    assert moved == ["model.safetensors", "config.json"]


@pytest.mark.parametrize(
    ("scaling", "length", "expected"),
    [(None, None, 2048), (None, 65536, 65536), (SCALINGS["llama3"], None, 256), (SCALINGS["linear"], None, 2048)],
)
def test_exported_config_has_the_maximum_length(tmp_path, scaling, length, expected):
    model = tiny_model(width=64, rope_scaling=scaling)
    save_pretrained(model, model.config, tmp_path, max_seq_len=length)
    assert LlamaConfig.from_pretrained(tmp_path).max_position_embeddings == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"qk_norm": True, "width": 64}, r"model\.qk_norm=true cannot be exported: the Llama layout has no norm"),
        ({"width": 50}, r"model\.width=50: must be a multiple of model\.n_heads=4"),
    ],
)
def test_export_refuses_features_that_llama_lacks(tmp_path, overrides, message):
    model = tiny_model(**overrides)
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, model.config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_refuses_weights_of_another_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"do not belong to this configuration: blocks\.2"):
        save_pretrained(tiny_model(width=64), tiny_config(width=64, n_layers=3), tmp_path)
    with pytest.raises(ValueError, match=r"embedding\.weight has shape \(96, 64\), and must have \(128, 64\)"):
        save_pretrained(tiny_model(width=64, vocab_size=96), tiny_config(width=64, vocab_size=128), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2'; only the Llama layout"),
        ({"model_type": "remove"}, r"model_type is None"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported; only 'silu' is"),
        ({"attention_bias": True}, r"attention_bias=True is not supported"),
        ({"max_position_embeddings": "2048"}, r"max_position_embeddings='2048': must be an integer"),
        ({"quantization_config": {"bits": 4}}, r"the weights are quantized"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2.*\(9 such tensors\)"),
        ({"num_hidden_layers": 1}, r"has an unexpected model\.layers\.1"),
        ({"intermediate_size": 96}, r"gate_proj\.weight has shape \(80, 48\), but config\.json says \(96, 48\)"),
        ({"hidden_size": "remove"}, r"config\.json lacks hidden_size"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_type='dynamic': must be linear, yarn, llama3",
        ),
    ],
)
def test_loading_refuses_models_that_are_not_plain_llama(tmp_path, changes, message):
    llama().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_pretrained(tmp_path)
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing \(only \.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_pretrained(tmp_path)


def test_extending_the_context_keeps_the_weights(tmp_path):
    """The most common use: load a model and replace its rotary scaling."""
    import dataclasses

    llama().save_pretrained(tmp_path)
    config, state = load_pretrained(tmp_path)
    model = Transformer(dataclasses.replace(config, rope_scaling=RopeScaling("yarn", 4.0, 2048)), attention="sdpa")
    model.load_state_dict(state)
    assert torch.equal(model.head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_the_error_in_transformers(tmp_path, dtype):
    """FlashAttention's rule: error against fp64 ≤ 2 × the error of PyTorch in the same precision; gradients 3 ×."""
    theirs = llama(num_hidden_layers=4)
    theirs.save_pretrained(tmp_path)
    tokens, labels = random_batch((2, 40), 96)
    packing = packing_of((40, 40))

    def run(model, dtype):
        model = model.to(dtype)
        packed = isinstance(model, Transformer)
        logits = model(tokens, packing=packing) if packed else model(tokens).logits
        logits.double().flatten(0, 1).gather(1, labels.clamp(min=0).view(-1, 1)).sum().backward()
        weight = model.blocks[0].mlp.gate.weight if packed else model.model.layers[0].mlp.gate_proj.weight
        return logits.detach().double(), weight.grad.double()

    exact = run(ours(tmp_path), torch.float64)
    for got, peer, reference, factor in zip(run(ours(tmp_path), dtype), run(theirs, dtype), exact, (2, 3), strict=True):
        assert (got - reference).abs().max() <= factor * (peer - reference).abs().max()


def test_rope_scaling_wins_over_rope_parameters(tmp_path):
    """As a model card says to add it to a config.json of transformers 5."""
    llama().save_pretrained(tmp_path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    edit_config(tmp_path, rope_scaling=yarn)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert ours(tmp_path).config.rope_scaling.kind == "yarn"
    assert_same_logits(ours(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path))


def test_an_export_for_longer_rows_keeps_the_rule_that_is_read(tmp_path):
    """A rule in rope_scaling, next to rope_parameters, whose original length is max_position_embeddings."""
    llama().save_pretrained(tmp_path)
    edit_config(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=32)
    config, state = load_pretrained(tmp_path)
    values = PretrainedSource.read(tmp_path).export_config(config, dtype="float32", seq_len=128)
    again = save_pretrained(state, config, tmp_path / "longer", values=values)
    assert values["max_position_embeddings"] == 128
    assert load_pretrained(again)[0].rope_scaling == config.rope_scaling == RopeScaling("yarn", 4.0, 32)
    assert_same_logits(*map(LlamaForCausalLM.from_pretrained, (tmp_path, again)))


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path):
    llama(tie_word_embeddings=False).save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="says tie_word_embeddings=true, but lm_head.weight is not the embedding"):
        load_pretrained(tmp_path)


def test_weights_of_several_dtypes_are_saved(tmp_path):
    state = tiny_model().to(torch.bfloat16).state_dict()
    state = {name: weight.float() if "norm" in name else weight for name, weight in state.items()}
    save_pretrained(state, tiny_config(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _, loaded = load_pretrained(tmp_path)
    assert all(
        torch.equal(loaded[name], weight) and loaded[name].dtype == weight.dtype for name, weight in state.items()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": "linear"},
            "config.json has a value of the wrong type: rope_scaling is 'linear', and must be",
        ),
        ({"rope_scaling": [1]}, "config.json has a value of the wrong type: rope_scaling is "),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
            "config.json: model.rope_scaling.factor='4': must be 1.0 or more",
        ),
        ({"hidden_size": "48"}, "config.json has a value of the wrong type: "),
    ],
)
def test_values_of_the_wrong_type_are_named(tmp_path, changes, message):
    llama().save_pretrained(tmp_path)
    edit_config(tmp_path, head_dim="remove", **changes)
    with pytest.raises(ValueError, match=f"init_from={tmp_path}: {message}"):
        load_pretrained(tmp_path)
