"""Command line > experiment > hardware > defaults, for values and for choices of groups."""

import pytest

from flash_train.cli.config.compose import compose_config

# All three set max_steps, the model and the learning rate: defaults, hardware, experiment
HARDWARE = """# @package _global_
defaults:
  - override /model: 350m
max_steps: 11
batch_size: 11
optimizer:
  lr: 0.11
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /model: 125m
max_steps: 22
optimizer:
  lr: 0.22
"""


@pytest.fixture
def extra(tmp_path):
    for group, text in (("hardware", HARDWARE), ("experiment", EXPERIMENT)):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(text)
    return str(tmp_path)


def seen(config):
    return config.max_steps, config.model.name, config.optimizer.lr


def test_defaults(extra):
    assert seen(compose_config([], extra)) == (200, "nano", None)


def test_hardware_over_defaults(extra):
    assert seen(compose_config(["hardware=mine"], extra)) == (11, "350m", 0.11)


@pytest.mark.parametrize("order", [1, -1])
def test_experiment_over_hardware(extra, order):
    config = compose_config(["hardware=mine", "experiment=mine"][::order], extra)
    assert seen(config) == (22, "125m", 0.22)
    assert config.batch_size == 11  # the experiment does not set it


@pytest.mark.parametrize("order", [1, -1])
def test_command_line_over_all(extra, order):
    overrides = ["hardware=mine", "experiment=mine", "max_steps=33", "model=1b3", "optimizer.lr=0.33"]
    assert seen(compose_config(overrides[::order], extra)) == (33, "1b3", 0.33)


def test_a_value_of_the_model_survives_its_choice_by_hardware(extra):
    config = compose_config(["model.n_layers=3", "hardware=mine"], extra)
    assert (config.model.name, config.model.n_layers) == ("350m", 3)
