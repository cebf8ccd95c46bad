"""LightningCLI builds the module, the data, callbacks and strategies from YAML, trains, and resumes bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

pytest.importorskip("jsonargparse", reason='LightningCLI needs jsonargparse: pip install "jsonargparse[signatures]"')

from lightning.pytorch.cli import LightningCLI

from flash_train.data import PackedDataModule, TextCorpus
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.training import CausalLMModule, NonFiniteLoss, StepCheckpoint, StepSeed, Throughput
from tests.support.pages import ROOT, blocks_of

PAGE = [block for block in blocks_of(ROOT / "docs" / "own_code.md") if block.section == "LightningCLI"]


class Bigram(nn.Module):
    """A model that is not a `Transformer`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def loss(self, tokens, labels, *, positions, packing):
        logits = self.table(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write the page's YAML, made small, in the present folder; changes are (section, key, value)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns of others
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (1 + i % 7))

    def write(*changes):
        values = yaml.safe_load(next(block.code for block in PAGE if block.language == "yaml"))
        values["data"] |= {"seq_len": 64, "cache_dir": "cache"}
        values["data"]["corpus"] = {"class_path": "flash_train.data.TextCorpus", "init_args": {"path": "texts"}}
        values["trainer"] |= {"max_steps": 2, "val_check_interval": 2, "limit_val_batches": 1, "accelerator": "cpu"}
        values["trainer"] |= {"strategy": "auto", "logger": False, "enable_progress_bar": False, "devices": 1}
        values["trainer"]["callbacks"][1]["init_args"]["every"] = 1
        values["model"]["model"] |= {"attention_dropout": 0.1}
        for section, key, value in changes:
            values[section][key] = value
        Path("run.yaml").write_text(yaml.safe_dump(values))

    write()
    return write


def cli(*arguments, **options):
    return LightningCLI(
        CausalLMModule, PackedDataModule, args=list(arguments), save_config_kwargs={"overwrite": True}, **options
    )


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_classes_are_built_from_plain_values(config):
    built = cli("--config=run.yaml", "--model.optimizer.lr=0.5", "--trainer.strategy=flash_sharded", run=False)
    assert built.model.model.config.width == 128 and built.model.model.memory == "selective"
    assert built.model.optimizer_config.lr == 0.5 and built.model.optimizer_config.warmup_steps == 10
    assert isinstance(built.datamodule.corpus, TextCorpus) and built.datamodule.seq_len == 64
    assert isinstance(built.trainer.strategy, ShardedStrategy)
    kinds = [type(callback) for callback in built.trainer.callbacks]
    assert {StepSeed, StepCheckpoint, Throughput, NonFiniteLoss} <= set(kinds)


def test_the_printed_configuration_runs_and_resumes_bit_for_bit(config, capsys):
    with pytest.raises(SystemExit):
        cli("fit", "--config=run.yaml", "--print_config")
    Path("printed.yaml").write_text(capsys.readouterr().out)
    cli("fit", "--config=printed.yaml")
    first, through = (Path("checkpoints") / f"step-00000{step}.ckpt" for step in (1, 2))
    whole = weights(through)
    through.unlink()
    torch.manual_seed(9)
    resumed = cli("fit", "--config=run.yaml", "--seed_everything=7", f"--ckpt_path={first}", "--weights_only=true")
    assert resumed.model.loaded_step == 1 and resumed.trainer.global_step == 2
    found = weights(through)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert not all(torch.equal(weights(first)[name], whole[name]) for name in whole)
    assert CausalLMModule.load_from_checkpoint(through, weights_only=True).model.config.width == 128


def test_another_model_resumes(config):
    config(
        ("model", "model", {"class_path": f"{__name__}.Bigram", "init_args": {"vocab_size": 320}}),
        ("trainer", "callbacks", [{"class_path": "StepCheckpoint", "init_args": {"folder": "own", "every": 1}}]),
    )
    first, through = (Path("own") / f"step-00000{step}.ckpt" for step in (1, 2))
    cli("fit", "--config=run.yaml")
    whole = weights(through)["model.table.weight"]
    through.unlink()
    cli("fit", "--config=run.yaml", f"--ckpt_path={first}", "--weights_only=true")
    assert torch.equal(weights(through)["model.table.weight"], whole)
    assert not torch.equal(weights(first)["model.table.weight"], whole)


@pytest.mark.parametrize(
    "argument, message",
    [("--data.packing=conct", "best_fit"), ("--trainer.strategy=flash_shared", "flash_shared")],
)
def test_mistakes(config, argument, message, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        cli("--config=run.yaml", argument, run=False)
    assert message in str(error.value) + capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_by_the_pages_program(config, tmp_path):
    config(("trainer", "devices", 2), ("trainer", "strategy", "flash_sharded"))
    Path("train.py").write_text(next(block.code for block in PAGE if block.language == "python"))
    done = subprocess.run(
        [sys.executable, "train.py", "fit", "--config", "run.yaml"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "step-000002.ckpt").is_dir()
