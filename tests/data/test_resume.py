"""A resumed run gets the same batches as an uninterrupted one, with Lightning's own Trainer."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.data.conftest import random_texts


class Recorder(lightning.LightningModule):
    """Stores the tokens of every batch, by optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, list]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.global_step, batch["tokens"].tolist()))
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopAtBatch(Callback):
    """Saves a checkpoint in `on_train_batch_end` of a batch, counted over the whole run, and stops there."""

    def __init__(self, batch: int, path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batch:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(data, path, *, steps=-1, callbacks=(), resume=None, module=None, **options) -> list[tuple[int, list]]:
    module = module or Recorder()
    trainer = lightning.Trainer(
        **{"max_steps": steps, "max_epochs": -1, **options},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        num_sanity_val_steps=0,
        default_root_dir=path,
        callbacks=list(callbacks),
        check_val_every_n_epoch=None,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module.seen


@pytest.mark.parametrize("stop", [2, 8, 30])  # early, in the middle of an epoch, and past its end
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 4}, {"limit_train_batches": 5}])
def test_resumed_batches_are_those_of_an_uninterrupted_run(make_data, tmp_path, stop, options):
    texts = random_texts(60, 150)
    assert 8 * 3 < make_data(texts).info["train"]["rows"] < 30 * 3
    whole = fit(make_data(texts), tmp_path, steps=20, accumulate_grad_batches=2, **options)
    # With five batches per Lightning epoch, the epoch's last step has one batch: the stop must be after a step.
    if "limit_train_batches" in options:
        stop = {2: 4, 8: 10, 30: 29}[stop]
    path = tmp_path / "stop.ckpt"
    stopped = fit(
        make_data(texts), tmp_path, steps=20, callbacks=[StopAtBatch(stop, path)], accumulate_grad_batches=2, **options
    )
    resumed = fit(make_data(texts), tmp_path, steps=20, resume=path, accumulate_grad_batches=2, **options)
    assert len(stopped) == stop and stopped == whole[:stop]
    assert stopped + resumed == whole


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 3}, {"limit_train_batches": 8}])
@pytest.mark.parametrize("stop", [1, 2, 5, 11])  # before the first step, and after
def test_a_stop_in_the_middle_of_an_accumulation_repeats_its_batches(make_data, tmp_path, stop, options):
    path, options = tmp_path / "stop.ckpt", {"accumulate_grad_batches": 3, **options}
    whole = fit(make_data(), tmp_path, steps=6, **options)
    # With 8 batches per epoch, the epoch's third step has two; batch 11 is then the third batch of the fourth step.
    stop -= "limit_train_batches" in options and stop == 11
    fit(make_data(), tmp_path, steps=6, callbacks=[StopAtBatch(stop, path)], **options)
    resumed = fit(make_data(), tmp_path, steps=6, resume=path, **options)
    # The batches after the last step were read, but their gradients are lost.
    done = [step for step, _ in whole].index(whole[stop - 1][0])
    assert 0 < stop - done < 3 and resumed == whole[done:]


@pytest.mark.parametrize("accumulate, stop", [((1, 4), 5), ((2, 3), 8), ((4, 1), 8), ((3, 2), 5)])
def test_another_accumulation_goes_on_with_the_next_batch_in_whole_steps(make_data, tmp_path, accumulate, stop):
    class Validations(Callback):
        def __init__(self):
            self.steps = []

        def on_validation_start(self, trainer, module):
            self.steps.append(trainer.global_step)

    before, after = accumulate
    path, seen, validations = tmp_path / "stop.ckpt", stop // before, Validations()
    stream = [tokens for _, tokens in fit(make_data(), tmp_path, steps=50)]
    options = {"accumulate_grad_batches": before, "val_check_interval": 3 * before}
    fit(make_data(), tmp_path, steps=12, callbacks=[StopAtBatch(stop, path)], **options)
    options = {"accumulate_grad_batches": after, "val_check_interval": 3 * after}
    resumed = fit(make_data(), tmp_path, steps=12, resume=path, callbacks=[validations], **options)
    steps = [step for step in range(seen, 12) for _ in range(after)]
    assert resumed == list(zip(steps, stream[seen * before :], strict=False))
    assert validations.steps == [step for step in (3, 6, 9, 12) if step > seen]


def test_logged_steps_go_on_where_they_were(make_data, tmp_path):
    class Logged(Callback):
        def __init__(self):
            self.steps = []

        def on_train_batch_end(self, trainer, module, *_):
            self.steps.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))

    path, options = tmp_path / "stop.ckpt", {"accumulate_grad_batches": 3, "val_check_interval": 6}
    whole, rest = Logged(), Logged()
    fit(make_data(), tmp_path, steps=6, callbacks=[whole], **options)
    fit(make_data(), tmp_path, steps=6, callbacks=[StopAtBatch(7, path)], **options)
    fit(make_data(), tmp_path, steps=6, resume=path, callbacks=[rest], **options)
    assert rest.steps == whole.steps[6:]


def test_stopping_twice(make_data, tmp_path):
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    whole = fit(make_data(), tmp_path, steps=12)
    seen = fit(make_data(), tmp_path, steps=12, callbacks=[StopAtBatch(3, first)])
    seen += fit(make_data(), tmp_path, steps=12, callbacks=[StopAtBatch(7, second)], resume=first)
    assert seen + fit(make_data(), tmp_path, steps=12, resume=second) == whole


@pytest.mark.parametrize("num_workers", [0, 1])
def test_model_checkpoints_count_no_batch_fetched_ahead(make_data, tmp_path, num_workers):
    saving = ModelCheckpoint(
        tmp_path, filename="{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1
    )
    whole = fit(make_data(), tmp_path, steps=6, accumulate_grad_batches=2, callbacks=[saving])
    for step in (1, 4):
        state = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["PackedDataModule"]
        assert state["consumed_batches"] == 2 * step
    data = make_data(num_workers=num_workers)
    assert fit(data, tmp_path, steps=6, accumulate_grad_batches=2, resume=tmp_path / "4.ckpt") == whole[8:]


def test_a_new_trainer_without_a_checkpoint_starts_anew(make_data, tmp_path):
    data = make_data()
    assert fit(data, tmp_path, steps=3) == fit(data, tmp_path, steps=3)


def test_a_trainer_with_a_distributed_sampler_of_its_own_leaves_batches_alone(make_data, tmp_path):
    data = make_data()
    seen = fit(data, tmp_path, steps=3, strategy="ddp", devices=1, use_distributed_sampler=True)
    assert [tokens for _, tokens in seen] == [
        batch["tokens"].tolist() for batch, _ in zip(make_data().train_dataloader(), range(3), strict=False)
    ]


class Planning(Recorder):
    """Reads `estimated_stepping_batches`, for which Lightning requests the loader before it restores its counts."""

    def configure_optimizers(self):
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stop", [1, 4, 8, 11, 16, 19])  # within and at the end of steps of three, and of epochs
def test_the_length_of_training_in_epochs_changes_no_resumed_batch(make_data, tmp_path, stop, accumulate):
    options = {"max_epochs": 3, "limit_train_batches": 8, "accumulate_grad_batches": accumulate}
    path, planning = tmp_path / "stop.ckpt", Planning()
    whole = fit(make_data(), tmp_path, module=planning, **options)
    assert len(whole) == 24 and planning.planned == (24 if accumulate == 1 else 9)
    fit(make_data(), tmp_path, module=Planning(), callbacks=[StopAtBatch(stop, path)], **options)
    resumed = fit(make_data(), tmp_path, module=Planning(), resume=path, **options)
    done = stop
    if accumulate > 1 and stop % 8 % 3:  # batches after the last step are read again
        done = [step for step, _ in whole].index(whole[stop - 1][0])
    assert resumed == whole[done:]


def test_a_loader_without_an_end_that_is_asked_for_early_begins_at_the_resumed_batch(make_data, tmp_path):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    path = tmp_path / "stop.ckpt"
    whole = fit(make_data(), tmp_path, steps=8, module=Planning(), **options)
    fit(make_data(), tmp_path, steps=8, module=Planning(), callbacks=[StopAtBatch(5, path)], **options)
    assert fit(make_data(), tmp_path, steps=8, module=Planning(), resume=path, **options) == whole[4:]


def test_stopping_twice_with_epochs_alone(make_data, tmp_path):
    options = {"max_epochs": 3, "limit_train_batches": 8, "accumulate_grad_batches": 3}
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    whole = fit(make_data(), tmp_path, module=Planning(), **options)
    seen = fit(make_data(), tmp_path, module=Planning(), callbacks=[StopAtBatch(3, first)], **options)
    seen += fit(make_data(), tmp_path, module=Planning(), callbacks=[StopAtBatch(14, second)], resume=first, **options)
    assert seen + fit(make_data(), tmp_path, module=Planning(), resume=second, **options) == whole


def test_data_restored_after_the_strategy_is_set_up_begin_at_the_resumed_batch(make_data, tmp_path):
    """Strategies that shard weights restore a checkpoint after they have created optimizers and loaders."""

    class Late(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    path = tmp_path / "stop.ckpt"
    whole = fit(make_data(), tmp_path, steps=8, module=Planning(), **options)
    fit(make_data(), tmp_path, steps=8, module=Planning(), callbacks=[StopAtBatch(5, path)], **options)
    late = {**options, "strategy": Late(torch.device("cpu"))}
    assert fit(make_data(), tmp_path, steps=8, module=Planning(), resume=path, **late) == whole[4:]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_overfit_batches_repeats_the_first_batches(make_data, tmp_path, accumulate):
    """In all epochs, and after resuming in the middle of an epoch."""
    first = [tokens for _, tokens in fit(make_data(), tmp_path, steps=4)]
    options = {"overfit_batches": 4, "accumulate_grad_batches": accumulate}
    seen = fit(make_data(), tmp_path, steps=12 // accumulate, **options)
    assert [tokens for _, tokens in seen] == 3 * first
    path = tmp_path / "stop.ckpt"
    fit(make_data(), tmp_path, steps=12 // accumulate, callbacks=[StopAtBatch(6, path)], **options)
    assert fit(make_data(), tmp_path, steps=12 // accumulate, resume=path, **options) == seen[6:]


def test_overfit_batches_of_one_is_the_same_batch_at_every_step(make_data, tmp_path):
    seen = fit(make_data(), tmp_path, steps=6, overfit_batches=1)
    assert len(seen) == 6 and all(tokens == seen[0][1] for _, tokens in seen)


NEVER = "data: training batches are endless, so an epoch never ends and nothing is validated"


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, True),
        ({"val_check_interval": 2}, False),
        ({"val_check_interval": "00:01:00:00"}, False),
        ({"limit_train_batches": 2}, False),
        ({"limit_val_batches": 0}, False),
    ],
    ids=str,
)
def test_a_validation_that_never_comes_is_a_line(make_data, tmp_path, capfd, options, warns):
    fit(make_data(), tmp_path, steps=2, **options)
    assert (NEVER in capfd.readouterr().err) == warns
