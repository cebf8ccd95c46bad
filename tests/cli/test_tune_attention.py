"""The decisions of the tuner and the table that it writes, from invented times."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention.kernels.portable.tiles import TABLE, VARIANTS, Tiles, tiles_for
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.cli.tune_attention import best, format_table, main, merge_row, row_of, sweep, tune_row
from flash_train.files import write_text
from flash_train.profiling.attention.tuning import Setting, Unfit

OLD, FAST, SLOW, UNFIT = Tile(64, 64, 4, 2), Tile(128, 64, 8, 3), Tile(32, 32, 4, 2), Tile(128, 128, 4, 3)


def trial_of(times):
    """A trial that takes `times[kernel, tile]` milliseconds, or 1.0."""

    def trial(kernel, tile):
        if tile == UNFIT:
            raise Unfit("out of resource: shared memory")
        return times.get((kernel, tile), 1.0)

    return trial


def tuned(times, kernels=("forward", "dq", "dkdv"), old=None, apart=False):
    old = Tiles(OLD, OLD, OLD) if old is None else old
    return tune_row(old, kernels, lambda kernel: [UNFIT, FAST, SLOW], trial_of(times), apart)


def test_each_kernel_takes_its_fastest_tile(capsys):
    tiles = tuned({("forward", FAST): 0.5, ("dq", SLOW): 0.9, ("dkdv", FAST): 2.0, ("dkdv", SLOW): 2.0})
    assert tiles == Tiles(FAST, OLD, SLOW)
    printed = capsys.readouterr().out
    assert "forward [128, 128, 4, 3]: skipped, out of resource: shared memory" in printed
    assert "64x64 4w 2s     1.000" in printed and "128x64 8w 3s     0.500    2.000" in printed


def test_kernels_that_were_not_chosen_keep_their_tiles(capsys):
    everywhere = {(kernel, FAST): 0.5 for kernel in ("forward", "dq", "dkdv")}
    assert tuned(everywhere, kernels=["dq"]) == Tiles(OLD, OLD, FAST)


def test_noise_changes_nothing():
    timed = sweep("forward", [OLD, FAST], trial_of({("forward", FAST): 0.995}))
    assert best(timed, OLD).tile == OLD and best(timed, None).tile == FAST
    assert best([], OLD) is None


def test_table_is_unchanged_if_no_tile_runs(capsys):
    everything = Tiles(UNFIT, UNFIT, UNFIT)
    assert tune_row(everything, ["forward", "dq", "dkdv"], lambda kernel: [], trial_of({}), True) == everything


@pytest.mark.parametrize("dk, dv, apart", [(0.3, 0.3, True), (0.6, 0.6, False), (0.5, 0.495, False)])
def test_two_launches_must_beat_one(capsys, dk, dv, apart):
    times = {("dkdv", FAST): 1.0, ("dk", SLOW): dk, ("dv", FAST): dv}
    for old in (Tiles(OLD, OLD, OLD), Tiles(OLD, OLD, OLD, OLD)):
        tiles = tuned(times, ["dkdv"], old, apart=True)
        assert (tiles.dv is not None) == apart
        if apart:
            assert (tiles.dkdv, tiles.dv) == (SLOW, FAST)


def test_two_launches_are_tried_if_asked_for_or_in_the_table(capsys):
    times = {("dk", SLOW): 0.1, ("dv", FAST): 0.1}
    assert tuned(times, ["dkdv"]).dv is None
    assert tuned(times, ["dkdv"], apart=True).dv == FAST
    assert tuned(times, ["dkdv"], Tiles(OLD, OLD, OLD, OLD)).dv == FAST


def test_formatting_the_shipped_table_changes_nothing():
    assert format_table(json.loads(TABLE.read_text())) == TABLE.read_text()


def test_a_new_row_replaces_the_old_one(tmp_path):
    table = json.loads(TABLE.read_text())
    setting = Setting(128, torch.bfloat16, "full", 16384, 16)
    row = row_of(setting, 232448, 9, Tiles(FAST, SLOW, OLD, FAST))
    assert row["shared"] == 227 and row["bits"] == 16
    merged = merge_row(table, row, VARIANTS)
    at = next(
        i for i, one in enumerate(table) if (one["shared"], one["head_dim"], one["variant"]) == (227, 128, "full")
    )
    assert merged[at] == row and merged[:at] + merged[at + 1 :] == table[:at] + table[at + 1 :]
    path = tmp_path / "tiles.json"
    write_text(path, format_table(merged))
    assert json.loads(path.read_text()) == merged


@pytest.fixture
def with_row(monkeypatch):
    """Adds a row to the table; returns a function that looks up the forward tile."""

    def look_up(row):
        merged = merge_row(json.loads(TABLE.read_text()), row, VARIANTS)
        monkeypatch.setattr("flash_train.attention.kernels.portable.tiles.load_table", lambda: merged)
        return lambda kib, major: tiles_for.__wrapped__(kib * 1024, torch.bfloat16, 128, "causal", major).forward

    return look_up


SETTING = Setting(128, torch.bfloat16, "causal", 16384, 16)


def test_a_new_amount_of_shared_memory_gets_its_own_rows(with_row):
    """An A100 has 163 KiB. Larger chips without a row use the A100's; smaller chips don't."""
    before = {kib: tiles_for(kib * 1024, torch.bfloat16, 128, "causal", 8).forward for kib in (99, 227)}
    forward = with_row(row_of(SETTING, 163 * 1024, 8, Tiles(UNFIT, SLOW, OLD)))
    assert [forward(kib, 8) for kib in (99, 163, 200, 227)] == [before[99], UNFIT, UNFIT, before[227]]


def test_data_center_blackwell_does_not_write_hoppers_rows(with_row):
    before = tiles_for(227 * 1024, torch.bfloat16, 128, "causal", 9).forward
    row = row_of(SETTING, 227 * 1024, 10, Tiles(UNFIT, SLOW, OLD))
    assert row["major"] == 10
    forward = with_row(row)
    assert forward(227, 9) == before and forward(227, 10) == UNFIT


def test_without_a_gpu_it_exits_with_3(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="3"):
        main(["64"])
    assert capsys.readouterr().err == "flash-train: tune_attention: needs an NVIDIA GPU, and there is none\n"


@pytest.mark.parametrize("arguments", [[], ["65"], ["64", "--variant", "sparse"], ["64", "--kernel", "rows"]])
def test_mistakes_end_in_one_line(capsys, arguments):
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flash-train: ")
