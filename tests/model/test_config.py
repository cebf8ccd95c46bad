"""ModelConfig: refused shapes, conversion to plain values and back, and the sizes in conf/model."""

from pathlib import Path

import pytest
import torch
import yaml

from flash_train.model import ModelConfig, RopeScaling, Transformer
from tests.support.model.tiny import tiny_config

CONF = Path(__file__).parents[2] / "conf" / "model"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head_dim": 257}, r"model\.head_dim=257: must be even and at most 256"),
        ({"head_dim": 15}, r"model\.head_dim=15: must be even and at most 256"),
        ({"n_kv_heads": 3}, r"model\.n_heads=4: must be a multiple of model\.n_kv_heads=3"),
        ({"n_layers": 0}, r"model\.n_layers=0: must be an integer of at least 1"),
        ({"width": 48.0}, r"model\.width=48\.0: must be an integer of at least 1"),
        ({"vocab_size": True}, r"model\.vocab_size=True: must be an integer of at least 1"),
        ({"residual_dropout": 1.0}, r"model\.residual_dropout=1\.0: must be in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"model\.attention_dropout=-0\.1: must be in \[0, 1\)"),
        ({"attention_dropout": 0.0005}, r"model\.attention_dropout=0\.0005: .* steps of 1/256 and this rounds to 0;"),
        ({"attention_dropout": 0.9999}, r"model\.attention_dropout=0\.9999: .* steps of 1/256 and this rounds to 1;"),
        (
            {"rope_scaling": RopeScaling("ntk", 1e300)},
            r"model\.rope_scaling\.factor=1e\+300: must be smaller, .*kind=ntk",
        ),
        ({"rope_theta": float("inf")}, r"model\.rope_theta=inf: must be positive and finite"),
        ({"norm_eps": 0.0}, r"model\.norm_eps=0\.0: must be positive and finite"),
    ],
)
def test_config_refuses_impossible_shapes(overrides, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dynamic", "factor": 2.0}, r"kind='dynamic': must be one of linear, ntk, yarn, llama3"),
        ({"kind": "linear", "factor": 0.5}, r"factor=0\.5: must be 1\.0 or more"),
        ({"kind": "linear", "factor": float("nan")}, r"factor=nan: must be 1\.0 or more"),
        ({"kind": "yarn", "factor": 2.0}, r"original_max_position_embeddings=None: must be .*, which yarn needs"),
        (
            {"kind": "llama3", "factor": 2.0, "original_max_position_embeddings": 0},
            r"=0: must be .*, which llama3 needs",
        ),
        (
            {"kind": "llama3", "factor": 2.0, "original_max_position_embeddings": 8, "low_freq_factor": 4.0},
            r"low_freq_factor=.*: must be more than 0 and less than high_freq_factor=",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_slow": 40.0},
            r"beta_slow=.*: must be more than 0 and less than beta_fast=",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 0.0},
            r"attention_factor=0\.0: must be positive and finite",  # all scores would be 0
        ),
        (
            {"kind": "yarn", "factor": float("inf"), "original_max_position_embeddings": 8},
            r"factor=inf: must be positive and finite",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": float("inf")},
            r"beta_fast=inf: must be positive and finite",
        ),
        (
            {"kind": "linear", "factor": 2.0, "attention_factor": 1.2},
            r"attention_factor=1\.2: must be left out; linear takes factor",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "high_freq_factor": 8.0},
            r"high_freq_factor=8\.0: must be left out; yarn takes factor, original_max_position_embeddings, ",
        ),
    ],
)
def test_scaling_refuses_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**arguments)


def test_config_round_trips_through_a_dictionary():
    config = tiny_config(rope_scaling=RopeScaling("yarn", 4.0, 2048), qk_norm=True, residual_dropout=0.1)
    values = config.to_dict()
    assert values["rope_scaling"]["kind"] == "yarn" and isinstance(values["rope_scaling"], dict)
    assert ModelConfig.from_dict(values) == config
    with pytest.raises(ValueError, match=r"model\.hidden is not a field: must be one of vocab_size, n_layers"):
        ModelConfig.from_dict(values | {"hidden": 3})
    with pytest.raises(ValueError, match=r"model\.width is missing"):
        ModelConfig.from_dict({k: v for k, v in values.items() if k != "width"})
    with pytest.raises(ValueError, match=r"model\.rope_scaling\.typo is not a field"):
        ModelConfig.from_dict(values | {"rope_scaling": {"kind": "linear", "factor": 2.0, "typo": 1}})
    with pytest.raises(TypeError, match=r"model\.rope_scaling={.*}: must be a RopeScaling or None"):
        tiny_config(rope_scaling={"kind": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 2.0),
        RopeScaling("yarn", 4.0, 2048, beta_fast=16.0, attention_factor=1.1),
        RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    ],
    ids=lambda s: s.kind,
)
def test_scaling_round_trips_through_the_format_of_transformers(scaling):
    assert RopeScaling.from_hf(scaling.to_hf() | {"rope_theta": 5e5}) == scaling


def test_scaling_reads_the_older_format_and_plain_rope():
    assert RopeScaling.from_hf({"type": "linear", "factor": 2.0}) == RopeScaling("linear", 2.0)
    assert RopeScaling.from_hf({"rope_type": "default", "rope_theta": 1e4}) is None
    assert RopeScaling.from_hf(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic': must be linear, yarn, llama3"),
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            "rope_type='longrope': must be linear, yarn, llama3",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "mscale": 0.7},
            "rope_type='yarn': must not have mscale",
        ),
    ],
)
def test_scaling_refuses_unknown_rules_of_transformers(given, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling.from_hf(given)


@pytest.mark.parametrize("overrides", [{}, {"tied_embeddings": True}, {"qk_norm": True}, {"n_kv_heads": 4}])
def test_parameter_count_equals_the_model(overrides):
    config = tiny_config(**overrides)
    with torch.device("meta"):
        assert Transformer(config).num_parameters() == config.num_parameters


# Counts worked out by hand from the shapes; the last is the published count of Llama 3 8B.
@pytest.mark.parametrize(
    ("size", "vocab_size", "parameters"),
    [
        ("nano", 320, 451_200),
        ("125m", 50_304, 123_587_328),
        ("350m", 50_304, 355_124_224),
        ("1b3", 32_768, 1_367_443_456),
        ("8b", 128_256, 8_030_261_248),
    ],
)
def test_model_sizes_in_conf_have_the_stated_parameters(size, vocab_size, parameters):
    values = yaml.safe_load((CONF / f"{size}.yaml").read_text(encoding="utf-8"))
    assert values["name"] == size and "attention_dropout" not in values
    config = ModelConfig.from_dict(values | {"vocab_size": values["vocab_size"] or vocab_size})
    with torch.device("meta"):
        model = Transformer(config)
    assert model.num_parameters() == config.num_parameters == parameters
    assert all(p.is_meta for p in model.parameters())
