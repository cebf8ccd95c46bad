"""A resumed run gets the same batches as an uninterrupted one, with Lightning's own Trainer."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from flash_train.data import ByteTokenizer, PackedDataModule, RecallCorpus
from flash_train.data.order.sampler import EndlessOrder
from tests.support.data.corpora import StreamedList, random_texts
from tests.support.data.loops import Recorder, StopAtBatch, fit
from tests.support.tiers import slow_after


@pytest.mark.parametrize("stop", [2, 8, 30])  # early, in the middle of an epoch, and past its end
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 4}, {"limit_train_batches": 5}])
def test_resumed_run_has_the_batches_of_an_uninterrupted_one(make_data, tmp_path, stop, options):
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
def test_stop_inside_an_accumulation_repeats_its_batches(make_data, tmp_path, stop, options):
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
def test_resuming_with_another_accumulation_continues_with_the_next_batch(make_data, tmp_path, accumulate, stop):
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


def test_logged_steps_continue_after_resuming(make_data, tmp_path):
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


def test_run_stopped_twice_has_the_same_batches(make_data, tmp_path):
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


def test_new_trainer_without_a_checkpoint_starts_at_the_first_batch(make_data, tmp_path):
    data = make_data()
    assert fit(data, tmp_path, steps=3) == fit(data, tmp_path, steps=3)


def test_lightnings_distributed_sampler_does_not_change_batches(make_data, tmp_path):
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
def test_max_epochs_does_not_change_resumed_batches(make_data, tmp_path, stop, accumulate):
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


def test_endless_loader_requested_early_begins_at_the_resumed_batch(make_data, tmp_path):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2}
    path = tmp_path / "stop.ckpt"
    whole = fit(make_data(), tmp_path, steps=8, module=Planning(), **options)
    fit(make_data(), tmp_path, steps=8, module=Planning(), callbacks=[StopAtBatch(5, path)], **options)
    assert fit(make_data(), tmp_path, steps=8, module=Planning(), resume=path, **options) == whole[4:]


def test_run_stopped_twice_has_the_same_batches_with_max_epochs_only(make_data, tmp_path):
    options = {"max_epochs": 3, "limit_train_batches": 8, "accumulate_grad_batches": 3}
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    whole = fit(make_data(), tmp_path, module=Planning(), **options)
    seen = fit(make_data(), tmp_path, module=Planning(), callbacks=[StopAtBatch(3, first)], **options)
    seen += fit(make_data(), tmp_path, module=Planning(), callbacks=[StopAtBatch(14, second)], resume=first, **options)
    assert seen + fit(make_data(), tmp_path, module=Planning(), resume=second, **options) == whole


def test_data_restored_after_strategy_setup_begin_at_the_resumed_batch(make_data, tmp_path):
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
        ({"val_check_interval": 1}, False),  # Lightning's default is 1.0
        ({"val_check_interval": "00:01:00:00"}, False),
        ({"limit_train_batches": 2}, False),
        ({"limit_val_batches": 0}, False),
    ],
    ids=str,
)
def test_validation_that_never_runs_prints_a_line(make_data, tmp_path, capfd, options, warns):
    fit(make_data(), tmp_path, steps=2, **options)
    assert (NEVER in capfd.readouterr().err) == warns


# -- another number of ranks


class Rank(SingleDeviceStrategy):
    """One device that says it has the rows of one of several ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": world_size}


def rows_by_step(make, folder, *, ranks, batch_size, accumulate, steps, resume=None, stop=None, **options):
    """The rows that all ranks read in each optimizer step, sorted. With `stop`, each rank saves and stops there."""
    found: dict[int, list] = {}
    for rank in range(ranks):
        callbacks = [StopAtBatch(stop * accumulate, folder / f"stop-{rank}.ckpt")] if stop else []
        seen = fit(
            make(batch_size=batch_size),
            folder,
            steps=steps,
            callbacks=callbacks,
            resume=resume,
            accumulate_grad_batches=accumulate,
            strategy=Rank(rank, ranks),
            **options,
        )
        assert len(seen) == (stop or steps - min(step for step, _ in seen)) * accumulate
        for step, tokens in seen:
            found.setdefault(step, []).extend(tokens)
    return {step: sorted(rows) for step, rows in found.items()}


def streamed(tmp_path):
    def make(**options):
        options = {"seq_len": 16, "seed": 7, "val_fraction": 0.1, "cache_dir": tmp_path / "stream", **options}
        return PackedDataModule(StreamedList(random_texts(2000, 30, seed=5)), ByteTokenizer(), **options)

    return make


def recall(**options):
    return PackedDataModule(RecallCorpus(n_pairs=4), seq_len=64, seed=7, **options)


SAME_STEP = [  # ranks, batch size, accumulation: always 24 rows in a step
    ((2, 3, 4), (4, 3, 2)),
    ((4, 1, 6), (1, 6, 4)),
    ((3, 4, 2), (2, 1, 12)),
    ((1, 2, 12), (8, 3, 1)),
]


@pytest.mark.parametrize("row_cost", [None, (1.0, 2.0)], ids=["in order", "dealt"])
@pytest.mark.parametrize("kind", ["rows", "stream", "recall"])
@pytest.mark.parametrize(("before", "after"), slow_after(1, SAME_STEP, unpack=True), ids=str)
def test_each_step_has_the_same_rows_on_another_number_of_ranks(
    make_data, tmp_path, monkeypatch, before, after, kind, row_cost
):
    """The steps pass the end of an epoch, and many chunks of a stream."""
    monkeypatch.setattr("flash_train.data.cache.BATCH_DOCUMENTS", 8)
    monkeypatch.setattr("flash_train.data.stream.CHUNK_ROWS", 16)

    def make(**options):
        made = {"rows": make_data, "stream": streamed(tmp_path), "recall": recall}[kind]
        return made(**options, row_cost=row_cost)

    names, steps, stop = ("ranks", "batch_size", "accumulate"), 14, 5
    before, after = (dict(zip(names, sizes, strict=True)) for sizes in (before, after))
    whole = rows_by_step(make, tmp_path, steps=steps, **before)
    assert sorted(whole) == list(range(steps)) and {len(rows) for rows in whole.values()} == {24}
    first = rows_by_step(make, tmp_path, steps=steps, stop=stop, **before)
    rest = rows_by_step(make, tmp_path, steps=steps, resume=tmp_path / f"stop-{before['ranks'] - 1}.ckpt", **after)
    assert first | rest == whole and not first.keys() & rest.keys()


@pytest.mark.parametrize("row_cost", [None, (0.0, 1.0)], ids=["in order", "dealt"])
def test_no_row_is_skipped_or_repeated_with_steps_of_another_size(make_data, tmp_path, row_cost):
    def make(**options):
        return make_data(**options, row_cost=row_cost)

    order = EndlessOrder(make_data().info["train"]["rows"], seed=7)
    n, stop = 2 * 3 * 3, 5
    rows_by_step(make, tmp_path, steps=9, stop=stop, ranks=2, batch_size=3, accumulate=3)
    resumed = rows_by_step(
        make, tmp_path, steps=9, resume=tmp_path / "stop-1.ckpt", ranks=4, batch_size=5, accumulate=2
    )
    data = make_data()
    data.setup()
    for step in range(stop, 9):
        expected = order.rows(stop * n + (step - stop) * 40, 40)
        assert resumed[step] == sorted(data._train[row]["tokens"].tolist() for row in expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_a_validation_reads_each_row_once_on_any_number_of_ranks(make_data, tmp_path, world_size):
    class Validating(Recorder):
        def validation_step(self, batch, batch_idx):
            self.seen.extend((batch_idx, row) for row in batch["tokens"].tolist())

    found, counts = [], set()
    for rank in range(world_size):
        data, module = make_data(batch_size=4), Validating()
        trainer = lightning.Trainer(
            strategy=Rank(rank, world_size), logger=False, enable_progress_bar=False, default_root_dir=tmp_path
        )
        trainer.validate(module, data, verbose=False)
        found += [row for _, row in module.seen if set(row) != {ByteTokenizer.pad}]
        counts.add(len(module.seen))
    data = make_data()
    data.setup()
    assert sorted(found) == sorted(data._val[row]["tokens"].tolist() for row in range(len(data._val)))
    assert len(counts) == 1
