"""The package's data and module in a user's own `Trainer`: as in the README, by epochs, for test and prediction."""

import io
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console

from flash_train.data import ByteTokenizer, PackedDataModule, RecallCorpus, TextCorpus
from flash_train.training import AtomicCheckpointIO, CausalLMModule, OptimizerConfig, StepCheckpoint, StepSeed
from tests.support.training.tiny_run import plain_trainer, tiny_config

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CONFIG = tiny_config(vocab_size=259, attention_dropout=0.1, residual_dropout=0.1)


@pytest.fixture
def make_data(tmp_path):
    """Rows of 64 tokens from forty small documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "the quick brown fox " * (1 + i % 7))

    def make(**options) -> PackedDataModule:
        return PackedDataModule(
            TextCorpus(folder), ByteTokenizer(), seq_len=64, batch_size=2, cache_dir=tmp_path / "cache", **options
        )

    return make


def module(seed: int = 0, **options) -> CausalLMModule:
    torch.manual_seed(seed)
    return CausalLMModule(CONFIG, OptimizerConfig(lr=1e-2, warmup_steps=2), attention="sdpa", **options)


class Losses(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append((trainer.global_step, pl_module.last_step and pl_module.last_step.loss.item()))


@pytest.mark.parametrize("stop", [3, 5, 7, 8, 12])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_with_max_epochs_only_is_bitwise_exact(stop, accumulate, make_data, tmp_path):
    """With `max_epochs` alone the number of steps is estimated. The run stops within a step, at its end, and after an
    epoch."""
    options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 5, "accumulate_grad_batches": accumulate}
    options |= {"limit_val_batches": 1, "num_sanity_val_steps": 0}

    def run(*callbacks, seed=0, checkpoint=None):
        losses, own = Losses(), module(seed)
        trainer = plain_trainer(tmp_path, StepSeed(0), losses, *callbacks, **options)
        trainer.fit(own, datamodule=make_data(), ckpt_path=checkpoint, weights_only=True)
        assert own.planned_steps == (15 if accumulate == 1 else 9)
        return losses.values, own.state_dict()

    whole, weights = run()
    assert len({loss for _, loss in whole}) == (15 if accumulate == 1 else 10)  # one loss per step

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.total.processed == stop:
                trainer.save_checkpoint(tmp_path / "stop.ckpt")
                trainer.should_stop = True

    run(Stop())
    resumed, resumed_weights = run(seed=9, checkpoint=tmp_path / "stop.ckpt")
    steps = dict(whole)
    again = {step: loss for step, loss in resumed if loss is not None}
    assert again == {step: loss for step, loss in steps.items() if step >= min(again)}
    assert max(again) == max(steps) and min(again) <= whole[stop - 1][0] + 1
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


def test_the_trainer_of_the_readme_shows_losses_and_validates(tmp_path, monkeypatch, make_data):
    (code,) = re.findall(r"```python\n(from lightning.pytorch import Trainer\n.*?)```", README, re.DOTALL)
    for given, small in [
        ("StdlibCorpus(), ByteTokenizer()", "CORPUS, ByteTokenizer()"),
        ("seq_len=16384", 'seq_len=64, cache_dir="cache"'),
        ("max_steps=100", 'max_steps=4, log_every_n_steps=2, accelerator="cpu", logger=False'),
        ("val_check_interval=50", "val_check_interval=2"),
        ("RichProgress()", "RichProgress(CONSOLE)"),
    ]:
        assert given in code
        code = code.replace(given, small)
    screen = Console(file=io.StringIO(), force_terminal=False, width=110)
    monkeypatch.chdir(tmp_path)
    names: dict = {"CORPUS": make_data().corpus, "CONSOLE": screen}
    exec(code, names)
    shown = screen.file.getvalue().splitlines()
    assert [re.sub(r"\d\.\d{4}.*", "x", line) for line in shown] == [
        *("step 2/4  loss x", "validation at step 2: loss x", "step 4/4  loss x", "validation at step 4: loss x")
    ]
    assert (tmp_path / "checkpoints" / "step-000004.ckpt").exists() and names["trainer"].global_step == 4


def test_trainer_test_gives_the_metrics_of_validation(make_data, tmp_path):
    data, own = make_data(), module(val_bytes_per_token=2.0)
    trainer = plain_trainer(tmp_path)
    (validated,) = trainer.validate(own, datamodule=data, verbose=False)
    (tested,) = trainer.test(own, datamodule=data, verbose=False)
    assert set(tested) == {"test/loss", "test/bits_per_byte"}
    assert {name.replace("test", "val"): value for name, value in tested.items()} == validated
    assert own.validation == pytest.approx(validated)  # a test is no validation


@pytest.mark.parametrize("asynchronous", [False, True])
def test_trainer_test_without_a_model_takes_the_newest_checkpoint(make_data, tmp_path, asynchronous):
    saving = StepCheckpoint(tmp_path / "c", every=1, keep=1, asynchronous=asynchronous)
    plugins = [AtomicCheckpointIO()] if asynchronous else None
    trainer = plain_trainer(tmp_path, saving, max_steps=3, limit_val_batches=0, plugins=plugins)
    with pytest.raises(ValueError, match="not configured to save the best model"):  # nothing is saved yet
        trainer.test(module(), datamodule=make_data(), ckpt_path="best", verbose=False)
    trained = module()
    trainer.fit(trained, datamodule=make_data())
    expected = trainer.test(trained, datamodule=make_data(), verbose=False)
    with torch.no_grad():
        trained.model.embedding.weight.zero_()
    assert trainer.test(datamodule=make_data(), verbose=False, weights_only=True) == expected
    assert Path(saving.best_model_path).name == "step-000003.ckpt"


def test_predictions_are_the_logits_of_each_document(make_data, tmp_path):
    data, own = make_data(val_fraction=0.5), module().eval()
    predicted = plain_trainer(tmp_path).predict(own, datamodule=data)
    batches = list(data.val_dataloader())
    assert len(predicted) == len(batches) > 1 and predicted[0].shape == (2, 64, 259)
    for logits, batch in zip(predicted, batches, strict=True):
        first = batch["lengths"][0]
        with torch.no_grad():
            torch.testing.assert_close(logits[:1, :first], own(batch["tokens"][:1, :first]), rtol=1e-4, atol=1e-5)
            # A document in a row gives the same result as by itself: it does not see the documents before it.
            start, length = batch["lengths"][0], batch["lengths"][1]
            if start + length <= 64:
                alone = own(batch["tokens"][:1, start : start + length])
                torch.testing.assert_close(logits[:1, start : start + length], alone, rtol=1e-4, atol=1e-5)


def test_predictions_also_from_loaders_that_are_given(make_data, tmp_path):
    own = module()
    ours = plain_trainer(tmp_path).predict(own, datamodule=make_data())
    given = plain_trainer(tmp_path).predict(own, dataloaders=make_data().val_dataloader())
    assert len(ours) == len(given) and all(map(torch.equal, ours, given))


def test_loaders_that_are_given_train_and_validate_as_the_data_module_does(make_data, tmp_path):
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    results = []
    for loaders in (False, True):
        data, losses, own = make_data(), Losses(), module()
        given = (
            {"train_dataloaders": data.train_dataloader(), "val_dataloaders": data.val_dataloader()}
            if loaders
            else {"datamodule": data}
        )
        plain_trainer(tmp_path, StepSeed(0), losses, **options).fit(own, **given)
        results.append((losses.values, own.validation))
    assert results[0] == results[1]


def test_answers_of_recall_are_tested(tmp_path):
    corpus = RecallCorpus(n_pairs=4)
    data = PackedDataModule(corpus, seq_len=64, batch_size=2, val_batches=2)
    own = module(answer_accuracy=True, chance_level=corpus.chance)
    (tested,) = plain_trainer(tmp_path).test(own, datamodule=data, verbose=False)
    assert set(tested) == {"test/loss", "test/answer_accuracy", "test/chance_level"}
