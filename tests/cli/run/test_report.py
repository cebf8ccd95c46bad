"""What a run prints before it starts."""

import pytest

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.validate import validate
from flash_train.cli.run.report import describe_data, unused_settings

PART = {"documents": 2, "tokens": 231, "rows": 1, "packing_efficiency": 0.9}


def test_one_row_is_not_rows():
    info = {"corpus": "text", "corpus_hash": "0123456789abcdef", "seq_len": 256, "train": PART, "val": PART}
    described = describe_data(info)
    assert "231 tokens in 1 row of 256" in described and "231 tokens in 1 row; hash" in described


@pytest.mark.parametrize(
    ("overrides", "key", "note"),
    [
        ("optimizer.master=exact precision=fp32", "optimizer.master", "exact has no effect with precision=fp32"),
        ("precision_fp8.recipe=rowwise", "precision_fp8.recipe", "rowwise has no effect with precision=fp32"),
        ("memory.keep=0.5", "memory.keep", "0.5 has no effect with memory=none"),
    ],
)
def test_a_setting_without_effect_is_noted(overrides, key, note):
    config = compose_config(["hardware=cpu", *overrides.split()])
    validate(config)  # a sweep over precision or memory may give it
    ((noted, text),) = unused_settings(config).items()
    assert noted == key and text.startswith(note)


@pytest.mark.parametrize(
    "overrides",
    [
        "seq_len=256",
        "optimizer.master=none",
        "optimizer.master=stochastic precision=bf16-true",
        "optimizer.master=exact precision=fp8 precision_fp8.recipe=rowwise",
        "memory.keep=auto",
        "memory.keep=0.5 memory=selective",
        "validate_only=true optimizer.master=exact",
        "experiment=long_context_131k",
    ],
)
def test_settings_with_an_effect_have_no_note(overrides):
    assert unused_settings(compose_config(["hardware=cuda", *overrides.split()])) == {}
