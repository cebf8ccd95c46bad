"""Advice on rotary positions, followed: it gives the trained frequencies scaled further, as transformers has them."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flash_train.cli.components.model_config import build_model_config, load_shape
from flash_train.cli.components.rotary import rotary_note
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.model import ModelConfig, RopeScaling, Transformer, save_pretrained
from flash_train.model.rope import rope_frequencies

HEAD_DIM = 128
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SETTING = re.compile(r"model\.\S+=\S+")


@pytest.fixture
def folder(tmp_path):
    """Writes a model whose config.json has these values; heads are as wide as Llama 3's."""

    def write(**values):
        shape = ModelConfig(
            vocab_size=320, n_layers=1, width=16, n_heads=1, n_kv_heads=1, head_dim=HEAD_DIM, mlp_width=16
        )
        save_pretrained(Transformer(shape, attention="sdpa"), shape, tmp_path / "model")
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": None} | values))
        return tmp_path / "model"

    return write


def built(folder, *overrides):
    """The model of a run with these overrides, and what the run says of its rotary positions."""
    chosen = [] if any(text.startswith("experiment=") for text in overrides) else ["model=pretrained"]
    config = compose_config([f"init_from={folder}", *chosen, *overrides])
    model = build_model_config(config, 259, load_shape(config))
    return model, rotary_note(config, model)


def theirs(theta, length, seq_len=None, **rope):
    """Inverse frequencies and the factor of cosines and sines by transformers."""
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=length,
        rope_parameters={"rope_theta": theta, **rope},
    )
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=seq_len)


# What config.json says, and the rule of transformers that is twice as far.
RULES = {
    "plain": ({"max_position_embeddings": 4096}, {"rope_type": "yarn", "factor": 2.0}),
    "llama3": ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, LLAMA3 | {"factor": 16.0}),
    "yarn": ({"max_position_embeddings": 131072, "rope_scaling": YARN}, YARN | {"factor": 8.0}),
    "yarn-with-the-old-length": ({"max_position_embeddings": 32768, "rope_scaling": YARN}, YARN | {"factor": 8.0}),
    "yarn-without-its-length": (
        {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        YARN | {"factor": 8.0},
    ),
    "linear": (
        {"max_position_embeddings": 16384, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 8.0},
    ),
}


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("name", RULES)
def test_advice_gives_the_trained_frequencies_scaled_further(folder, name, theta):
    values, expected = RULES[name]
    path = folder(rope_theta=theta, **values)
    length = values["max_position_embeddings"] * (4 if "old-length" in name or "without" in name else 1)
    own, note = built(path, f"seq_len={2 * length}")
    assert f"made for rows of {length:,} tokens and these have {2 * length:,}" in note
    advised, note = built(path, f"seq_len={2 * length}", *SETTING.findall(note))
    assert note is None

    if name == "plain":
        expected = expected | {"original_max_position_embeddings": length}
    frequencies, scale = rope_frequencies(advised)
    reference, reference_scale = theirs(theta, 2 * length, **expected)
    torch.testing.assert_close(frequencies, reference, rtol=1e-6, atol=0)
    assert scale == pytest.approx(reference_scale, rel=1e-12)

    turned = frequencies / rope_frequencies(own)[0]
    assert turned[-1].item() == pytest.approx(0.5, rel=1e-5)  # a pair that does not turn once in training
    assert turned.max() < 1.001 and turned[0].item() == pytest.approx(0.5 if name == "linear" else 1.0, rel=1e-5)


def test_no_advice_up_to_the_length_that_the_model_is_made_for(folder):
    for values, _ in RULES.values():
        assert built(folder(**values), f"seq_len={values['max_position_embeddings']}")[1] is None


def test_a_resumed_run_gets_no_advice_that_its_checkpoint_refuses(folder):
    path = folder(max_position_embeddings=131072, rope_scaling=LLAMA3)
    assert "factor=16" in built(path, "seq_len=262144")[1]
    assert built(path, "seq_len=262144", "resume=step-000003.ckpt")[1] is None


def test_extend_llama_raises_theta_and_says_nothing_of_scaling(folder):
    path = folder(max_position_embeddings=131072, rope_theta=5e5, rope_scaling=LLAMA3)
    model, note = built(path, "experiment=extend_llama", "seq_len=262144")
    assert note is None
    assert model.rope_theta == 4e6 and model.rope_scaling == RopeScaling("llama3", 8.0, 8192)


def test_linear_scaling_may_reach_farther_than_the_file_says(folder):
    path = folder(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0})
    assert "if its linear scaling by 4 reaches no farther, " in built(path, "seq_len=16384")[1]


@pytest.mark.parametrize(
    ("values", "overrides", "kept"),
    [
        (
            {"max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": LLAMA3},
            [
                *("seq_len=262144", "model.rope_scaling.kind=yarn", "model.rope_scaling.factor=2"),
                "model.rope_scaling.original_max_position_embeddings=131072",
            ],
            RopeScaling("llama3", 16.0, 8192),
        ),
        ({"rope_theta": 1e7, "max_position_embeddings": 131072}, ["experiment=extend_llama"], None),
        (
            {"max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": LLAMA3},
            ["seq_len=8192", "model.rope_scaling.kind=none"],
            RopeScaling("llama3", 8.0, 8192),
        ),
    ],
    ids=["yarn-in-place-of-llama3", "theta-that-is-lower", "no-rule"],
)
def test_settings_that_turn_faster_than_in_training_are_named(folder, values, overrides, kept):
    path = folder(**values)
    own, _ = built(path)
    changed, note = built(path, *overrides)
    times = (rope_frequencies(changed)[0] / rope_frequencies(own)[0]).max().item()
    assert times > 1.2 and f"turn up to {times:.3g} times as fast as it was trained with" in note
    again = [text for text in overrides if not text.startswith("model.")]
    followed, note = built(path, *again, *SETTING.findall(note))
    assert note is None and (followed.rope_theta, followed.rope_scaling) == (values["rope_theta"], kept)


def test_part_of_a_rule_replaces_that_part_alone(folder):
    path = folder(max_position_embeddings=131072, rope_scaling=LLAMA3 | {"low_freq_factor": 2.0})
    model, _ = built(path, "model.rope_scaling.factor=32")
    assert model.rope_scaling == RopeScaling("llama3", 32.0, 8192, low_freq_factor=2.0)


def test_an_attention_factor_grows_as_that_of_yarn_does():
    own = RopeScaling("yarn", 4.0, 4096)
    named = dataclasses.replace(own, attention_factor=0.1 * torch.tensor(4.0).double().log().item() + 1)
    shape = {"vocab_size": 1, "n_layers": 1, "width": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 64, "mlp_width": 1}
    first, second = (
        rope_frequencies(ModelConfig(**shape, rope_scaling=rule.stretched(3.0)))[1] for rule in (own, named)
    )
    assert first == pytest.approx(second, rel=1e-12) and first > 1.2


@pytest.mark.parametrize("seq_len", [1024, 4096, 5000, 16384])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_dynamic_rule_is_refused_with_the_fixed_rule_of_the_same_frequencies(folder, factor, seq_len):
    path = folder(max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": factor})
    with pytest.raises(UsageError, match="its rotary rule 'dynamic' changes with the length") as refusal:
        built(path, f"seq_len={seq_len}")
    model, note = built(path, f"seq_len={seq_len}", *SETTING.findall(str(refusal.value)))
    reference, _ = theirs(1e4, 4096, seq_len, rope_type="dynamic", factor=factor)
    torch.testing.assert_close(rope_frequencies(model)[0], reference, rtol=1e-6, atol=0)
    assert note is None


def test_the_advice_for_a_dynamic_rule_reads_the_rule_that_transformers_reads(folder):
    """rope_scaling, also where rope_parameters is there."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    path = folder(max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.0}, rope_parameters=plain)
    with pytest.raises(UsageError, match=r"model\.rope_scaling\.kind=ntk model\.rope_scaling\.factor=7$"):
        built(path, "seq_len=16384")


def test_a_rule_without_its_factor_is_refused_with_one_that_works(folder):
    path = folder(rope_scaling={"type": "linear"})
    with pytest.raises(UsageError, match="rope_type='linear': has no factor") as refusal:
        built(path)
    model, _ = built(path, *(text.replace("NUMBER", "4") for text in SETTING.findall(str(refusal.value))))
    assert model.rope_scaling == RopeScaling("linear", 4.0)


def test_plain_rotary_positions_take_no_factor(folder):
    with pytest.raises(UsageError, match=r"rope_scaling\.factor=2\.0: model\.rope_scaling\.kind=none takes none"):
        built(folder(), "model.rope_scaling.kind=none", "model.rope_scaling.factor=2")
