"""The axes of an ablation, as trials."""

import os

import pytest

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import quote
from flash_train.files import write_text
from tests.support.cli.sweeps import planned


def test_trials_are_all_combinations_shortest_first(tmp_path):
    sweep = planned(
        f"run_dir={tmp_path}", "sweep.seq_len=[64,128]", "sweep.attention=[standard,sdpa]", "sweep.memory=[none]"
    )
    assert [trial.trial.name for trial in sweep.trials] == [
        f"seq_len={n},memory=none,attention={name}" for n in (64, 128) for name in ("standard", "sdpa")
    ]
    assert sweep.trials[0].axes == {
        **{"seed": 0, "model": "nano", "precision": "fp32", "packing": "best_fit", "dropout": 0.0},
        **{"seq_len": 64, "parallel": "auto", "memory": "none", "attention": "standard"},
    }
    assert {trial.config.seed for trial in sweep.trials} == {0}
    assert all(trial.config.callbacks.step_times and not trial.config.trainer.checkpoints for trial in sweep.trials)


def test_runs_of_several_seeds_have_own_folders_and_the_same_validation_tokens(tmp_path):
    sweep = planned(f"run_dir={tmp_path}", "sweep.seed=[3,1]", "sweep.seq_len=[64,128]", "attention=sdpa")
    assert [(trial.config.seed, trial.axes["seed"], trial.axes["seq_len"]) for trial in sweep.trials] == [
        *((3, 3, 64), (3, 3, 128), (1, 1, 64), (1, 1, 128))
    ]
    assert {(trial.config.data.val_tokens, trial.config.data.val_batches) for trial in sweep.trials} == {(32768, None)}
    (only,) = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "attention=sdpa", "seed=5").trials
    assert only.axes["seed"] == only.config.seed == 5
    (alone,) = planned(f"run_dir={tmp_path}", "seq_len=64", "attention=sdpa").trials
    assert alone.trial.folder == tmp_path / "cells" / "trial"


def test_given_key_is_not_an_axis(tmp_path):
    sweep = planned(f"run_dir={tmp_path}", "seq_len=96", "attention=sdpa", "sweep.dropout=[0.0,0.1]", "max_steps=7")
    assert [(trial.axes["seq_len"], trial.axes["dropout"], trial.config.max_steps) for trial in sweep.trials] == [
        (96, 0.0, 7),
        (96, 0.1, 7),
    ]


def test_runs_form_a_wandb_group(tmp_path):
    sweep = planned(f"run_dir={tmp_path / 'a=1, b'}", "sweep.seq_len=[64]", "sweep.attention=[sdpa]")
    (only,) = sweep.trials
    assert only.config.logger.name == "wandb"
    (again,) = [text for text in only.trial.overrides if text.startswith("logger.group")]
    assert again == "logger.group='a=1, b'"
    assert only.config.logger.group == "a=1, b"  # with which the table is logged
    quiet = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "sweep.attention=[sdpa]", "logger=none")
    assert not [text for text in quiet.trials[0].trial.overrides if text.startswith("logger.group")]


@pytest.mark.parametrize("group", ["it's", "runs of mine"])
def test_wandb_group_may_have_any_name(tmp_path, group):
    axes = ("sweep.seq_len=[64]", "sweep.attention=[sdpa]")
    for arguments in ((f"run_dir={tmp_path / group}",), (f"run_dir={tmp_path}", quote("logger.group", group))):
        (only,) = planned(*arguments, *axes).trials
        assert compose_config(only.trial.overrides).logger.group == group


def test_key_set_by_an_experiment_is_not_an_axis(tmp_path):
    arguments = (f"run_dir={tmp_path}", "experiment=long_context_131k")
    (only,) = planned(*arguments).trials
    assert [only.axes[name] for name in ("model", "seq_len", "attention", "memory")] == [
        *("1b3", 131072, "flash", "checkpoint")
    ]
    asked = planned(*arguments, "sweep.seq_len=[64,128]").trials
    assert [(trial.axes["seq_len"], trial.axes["attention"]) for trial in asked] == [(64, "flash"), (128, "flash")]

    write_text(tmp_path / "experiment" / "mine.yaml", "# @package _global_\nattention:\n  backend: sdpa\n")
    own = planned(f"run_dir={tmp_path}", "experiment=mine", "--config-dir", str(tmp_path)).trials
    assert [(trial.axes["seq_len"], trial.axes["attention"]) for trial in own] == [
        (n, "sdpa") for n in (256, 512, 1024)
    ]


def test_parallel_trials_share_the_cores(tmp_path, monkeypatch):
    arguments = (f"run_dir={tmp_path}", "sweep.seq_len=[64]", "attention=sdpa", "sweep.jobs=3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert planned(*arguments).environs == ({"OMP_NUM_THREADS": "4"},) * 3

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,4,6,8,9")
    on_gpus = [*arguments, "trainer.accelerator=cuda", "trainer.devices=2"]
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in planned(*on_gpus).environs] == ["0,2", "4,6", "8,9"]
    with pytest.raises(UsageError, match=r"sweep.jobs=4: needs 8 GPUs, and there are 6; allowed: 3"):
        planned(*on_gpus, "sweep.jobs=4")


def test_unavailable_trials_are_known_from_the_configuration(tmp_path):
    sweep = planned(f"run_dir={tmp_path}", "sweep.seq_len=[64]", "sweep.precision=[fp32,fp16-mixed]", "attention=sdpa")
    assert [trial.unavailable and "needs a GPU" in trial.unavailable for trial in sweep.trials] == [None, True]
