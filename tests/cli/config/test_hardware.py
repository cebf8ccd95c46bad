"""What `hardware=auto` chooses on various machines."""

import pytest

from flash_train.cli.config import hardware
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.hardware import Device, choose
from flash_train.cli.config.paths import conf_dir
from flash_train.cli.run.prepare import prepare

MACHINES = [
    (Device("cpu", "no GPU found"), "cpu", ("nano", "fp32", "none", "auto")),
    (Device("cuda", "NVIDIA H200", 139.7, (9, 0)), "cuda", ("125m", "bf16-mixed", "none", "auto")),
    (Device("cuda", "NVIDIA A100", 39.4, (8, 0)), "cuda", ("125m", "bf16-mixed", "none", "auto")),
    (Device("cuda", "RTX 4070", 11.7, (8, 9)), "cuda_small", ("125m", "bf16-mixed", "selective", "auto")),
    (Device("cuda", "Tesla V100", 31.7, (7, 0)), "cuda_old", ("125m", "fp16-mixed", "selective", "sdpa")),
    (Device("cuda", "Tesla T4", 14.6, (7, 5)), "cuda_old", ("125m", "fp16-mixed", "selective", "sdpa")),
    (Device("mps", "Apple GPU"), "mps", ("nano", "fp32", "none", "sdpa")),
]


@pytest.mark.parametrize(("device", "expected", "settings"), MACHINES, ids=lambda x: getattr(x, "name", None))
def test_choice(device, expected, settings):
    choice, reason = choose(device)
    assert choice == expected
    assert device.name in reason
    assert (conf_dir() / "hardware" / f"{choice}.yaml").is_file()
    config = compose_config([f"hardware={choice}"])
    assert (config.model.name, config.precision, config.memory.mode, config.attention.backend) == settings


@pytest.mark.parametrize("given", [[], ["hardware=auto"], ["--cfg", "job"]])
def test_auto_is_replaced_before_composing(monkeypatch, given):
    monkeypatch.setattr(hardware, "detect", lambda: Device("cuda", "RTX 4070", 11.7, (8, 9)))
    assert "hardware=cuda_small" in prepare([*given, "seq_len=128", "run_dir=run"])


@pytest.mark.parametrize(("max_steps", "words"), [(1, "1 step"), (7, "7 steps")])
def test_auto_prints_its_choice_and_the_reason(monkeypatch, capsys, max_steps, words):
    monkeypatch.setattr(hardware, "detect", lambda: Device("cuda", "RTX 4070", 11.7, (8, 9)))
    prepare([f"max_steps={max_steps}", "run_dir=run"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"hardware: cuda_small (RTX 4070, 12 GiB, sm_89: less than 16 GiB): 125m, bf16-mixed, {words}"


def test_only_the_first_process_prints_its_choice(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert "hardware=cpu" in prepare(["run_dir=run"])
    assert capsys.readouterr().out == ""


def test_a_named_choice_is_left_alone(monkeypatch, capsys):
    monkeypatch.delattr(hardware, "detect")
    assert prepare(["hardware=mps", "run_dir=run"]) == ["hardware=mps", "run_dir=run"]
    assert capsys.readouterr().out == ""
