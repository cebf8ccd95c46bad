"""An ablation's tables: the best of comparable trials, ratios, and differences between losses."""

import csv
import io
import math
from dataclasses import replace

import pytest

from flash_train.profiling.ablation.table import (
    COLUMNS,
    Difference,
    Row,
    by_length,
    format_versions,
    from_csv,
    loss_differences,
    losses_to_csv,
    title,
    to_csv,
    to_markdown,
    where_slower,
)

AXES = {"model": "nano", "dropout": 0.0, "seq_len": 64, "memory": "none", "attention": "sdpa"}


def row(status="ok", reason=None, losses=(3.0, 3.0, 3.0), *, step=None, tokens=None, peak=None, ran=None, **axes):
    measured = {"step_seconds": step, "tokens_per_second": tokens, "peak_memory_gib": peak}
    return Row({**AXES, **axes}, status, reason, measured, dict(enumerate(losses, 1)), ran)


ROWS = [
    row(attention="standard", step=0.4, tokens=100.0, peak=2.0, losses=[4.0, 3.0, 2.0]),
    row(attention="flash", step=0.1, tokens=400.0, peak=3.0, losses=[4.0, 3.0, 2.002]),
    row(attention="standard", seq_len=128, step=2.0, tokens=50.0, peak=8.0, losses=[4.0, 3.0, 1.0]),
    row(attention="flash", seq_len=128, step=4.0, tokens=25.0, peak=4.0, losses=[4.0, 3.0, 1.0]),
    row("oom", "out of | memory\nhere", (), attention="standard", seq_len=256),
]


def test_slower_backend_is_listed():
    assert where_slower(ROWS, "flash") == ["seq_len=128 (4,000 ms, standard 2,000 ms)"]
    few = [row(attention="sdpa", step=1.0, losses=[4.0, 3.0]), row(attention="flash", step=2.0)]
    assert where_slower(few, "flash") == []  # two steps are one time
    assert where_slower([row(attention="flash", step=2.0, dropout=0.1), row(step=1.0)], "flash") == []


def lines_of(markdown):
    return [line for line in markdown.splitlines() if line.startswith("|")]


def test_the_best_of_comparable_cells_is_bold_and_ratios_are_to_standard():
    header, _, *lines = lines_of(to_markdown(ROWS, "title"))[:6]
    assert header == "| seq_len | attention | step ms | × | tokens/s | peak GiB | × |"
    assert lines == [
        "| 64 | standard | 400.0 | 1.00 | 100 | **2.00** | 1.00 |",
        "| 64 | flash | **100.0** | 0.25 | **400** | 3.00 | 1.50 |",
        "| 128 | standard | **2,000** | 1.00 | **50** | 8.00 | 1.00 |",
        "| 128 | flash | 4,000 | 2.00 | 25 | **4.00** | 0.50 |",
    ]


def test_trials_that_did_not_run_are_listed_with_their_reason():
    text = to_markdown(ROWS, "title")
    assert text.startswith("# title\n\nEvery trial has model=nano, dropout=0.0, memory=none.\n")
    assert lines_of(text)[-1] == r"| 256 | standard | oom | out of \| memory here |"


def test_no_ratios_without_standard_and_no_best_of_one():
    text = to_markdown([row(step=0.1), row(step=0.2, seq_len=128)], "title")
    assert "×" not in text
    assert lines_of(text)[2:] == ["| 64 | sdpa | 100.0 |", "| 128 | sdpa | 200.0 |"]


def test_a_ratio_is_to_standard_at_the_same_memory():
    rows = [
        row(attention="standard", memory="none", step=0.1),
        row(attention="standard", memory="checkpoint", step=0.2),
        row(attention="flash", memory="checkpoint", step=0.1),
    ]
    assert lines_of(to_markdown(rows, "title"))[2:] == [
        "| 64 | none | standard | **100.0** | 1.00 |",
        "| 64 | checkpoint | standard | 200.0 | 1.00 |",
        "| 64 | checkpoint | flash | **100.0** | 0.50 |",
    ]


def test_losses_are_compared_if_only_attention_and_memory_differ():
    near = pytest.approx(1e-3, rel=2e-3)
    assert loss_differences(ROWS) == [Difference("seq_len=64", near), Difference("seq_len=128", 0.0)]
    dropped = [row(losses=[2.0]), row(losses=[1.0], dropout=0.1), row("failed", losses=[9.0], memory="checkpoint")]
    assert loss_differences(dropped) == []
    assert "- seq_len=64: largest relative difference 1.0e-03\n" in to_markdown(ROWS, "title")


def test_dropout_explains_a_difference_between_backends():
    sdpa, flash = row(losses=[2.0], dropout=0.1), row(losses=[1.0], dropout=0.1, attention="flash")
    (found,) = loss_differences([sdpa, flash])
    assert found.finding == "largest relative difference 5.0e-01, because dropout masks differ between backends"
    for other in (
        row(losses=[1.0], dropout=0.1, memory="checkpoint"),
        row(losses=[1.0], dropout=0.1, attention="auto", ran="sdpa"),
    ):
        assert not loss_differences([sdpa, other])[0].masks_differ


def test_backend_chosen_by_auto_is_shown():
    rows = [row(step=0.1, attention="auto", ran="sdpa"), row("failed", "a bug", attention="auto", seq_len=128)]
    assert [line.split(" | ")[1] for line in lines_of(to_markdown(rows, "title"))[2:]][::3] == ["auto: sdpa", "auto"]
    assert [read.ran for read in from_csv(to_csv(rows))] == ["sdpa", None]


def test_table_explains_its_times_and_common_settings():
    text = to_markdown(ROWS, "title", ["data=stdlib", "torch 2.0"])
    assert "Every trial has model=nano, dropout=0.0, memory=none, data=stdlib, torch 2.0.\n" in text
    for words in ("median of a trial's steps 2 to N", "part of forward and backward", "logging and callbacks"):
        assert words in text
    assert format_versions({"commit": "0123456789abcdef-dirty", "torch": "2.8.0", "triton": None}) == [
        *("commit 0123456789ab-dirty", "torch 2.8.0"),
    ]
    assert title("a card", 1) == "Ablation on a card, 1 step" and title("a card", 2).endswith("2 steps")


def test_nothing_is_best_after_too_few_steps():
    few = [row(step=step, losses=[3.0, 3.0], attention=name) for name, step in (("sdpa", 0.1), ("flash", 0.2))]
    text = to_markdown(few, "title")
    assert "**" not in text and "that takes 3 steps" in text
    for slow, marked in ((0.5, ["**200.0**", "300.0"]), (0.1, ["200.0", "300.0"])):  # nor if another was faster
        rows = [few[0], row(step=0.2, attention="flash"), row(step=0.3, attention="standard")]
        rows[0].measured["step_seconds"] = slow
        steps = [line.split("|")[3].strip() for line in lines_of(to_markdown(rows, "title"))[2:]]
        assert steps == [f"{slow * 1e3:.1f}", *marked]


def spread(row, by):
    return replace(row, measured={**row.measured, "step_spread": by})


def test_disturbed_trial_is_marked_and_never_best():
    rows = [
        spread(row(attention="standard", step=0.4, tokens=10.0, peak=2.0), 0.02),
        spread(row(attention="sdpa", step=0.2, tokens=30.0, peak=1.0), 0.34),
        spread(row(attention="flash", step=0.3, tokens=20.0, peak=2.0), 0.1),
    ]
    text = to_markdown(rows, "title")
    assert lines_of(text)[2:] == [
        "| 64 | standard | 400.0 | 1.00 | 2% | 10 | 2.00 | 1.00 |",
        "| 64 | sdpa | 200.0 † | 0.50 | 34% | 30 | **1.00** | 0.50 |",  # memory is not a matter of what else runs
        "| 64 | flash | 300.0 | 0.75 | 10% | 20 | 2.00 | 1.00 |",  # nor is the best known where one was disturbed
    ]
    assert "†: the spread is more than 10%" in text and "distance between the quartiles" in text
    assert where_slower(rows, "flash") == []
    assert "200.0 † · 1.0" in by_length(rows) and "†: the spread is more" in by_length(rows)
    rows[1] = spread(row(attention="sdpa", step=0.5, tokens=5.0, peak=1.0), 0.34)
    assert "| 64 | flash | **300.0** |" in to_markdown(rows, "title")
    assert "†" not in by_length(ROWS) and "Spread" not in to_markdown(ROWS, "title")


def test_several_seeds_are_one_row_and_losses_are_compared_seed_by_seed():
    rows = [
        row(attention=name, step=step + seed / 100, losses=[4.0 + seed] * 3, seed=seed)
        for seed in (0, 1, 2)
        for name, step in (("sdpa", 1.0), ("flash", 2.0))
    ]
    rows.append(row("failed", "a | bug", seed=0, seq_len=128))
    text = to_markdown(rows, "title", ["seed=0", "data=stdlib"])
    assert "Every trial has model=nano, dropout=0.0, memory=none, seed=[0,1,2], data=stdlib.\n" in text
    assert [line.split(" | ")[2:] for line in lines_of(text)[2:4]] == [
        ["3", "**1,010**", "2% |"],
        ["3", "2,010", "1% |"],
    ]
    assert lines_of(text)[-1] == r"| 128 | sdpa | 0 | failed | a \| bug |"
    assert loss_differences(rows) == [Difference(f"seq_len=64, seed={seed}", 0.0) for seed in (0, 1, 2)]
    assert [read.axes["seed"] for read in from_csv(to_csv(rows))] == [0, 0, 1, 1, 2, 2, 0]
    assert "1,010 · –" in by_length(rows)


def test_table_gives_the_number_of_validation_tokens():
    rows = [row(step=0.1), row(step=0.1, seq_len=128)]
    for each in rows:
        each.measured["val_tokens"] = 32768
    assert "val_tokens=32,768.\n" in to_markdown(rows, "t") and "val. tokens" not in to_markdown(rows, "t")
    rows[0].measured["val_tokens"] = 256
    assert "val_tokens=" not in to_markdown(rows, "t") and "| 256 |" in lines_of(to_markdown(rows, "t"))[2]


NAN = float("nan")


@pytest.mark.parametrize("lost", [NAN, float("inf")])
def test_values_that_are_not_finite_are_shown_and_never_best(lost):
    rows = [
        row(attention="standard", step=lost, peak=lost, losses=[3.0, lost, lost]),
        row(attention="sdpa", step=0.2, peak=1.0),
        row(attention="flash", step=0.1, peak=2.0),
    ]
    for order in (rows, rows[::-1]):
        lines = {line.split(" | ")[1]: line for line in lines_of(to_markdown(order, "title"))[2:]}
        assert "**" not in lines["standard"] and "–" in lines["standard"]
        assert "**100.0** | –" in lines["flash"] and "**1.00**" in lines["sdpa"]
        (found,) = loss_differences(order)
        assert math.isnan(found.largest) and found.finding == "a loss that is not finite: attention=standard"
        assert where_slower(order, "sdpa") == ["seq_len=64 (200.0 ms, flash 100.0 ms)"]


def test_equally_fast_backend_is_not_listed_as_slower():
    assert where_slower([row(step=0.1), row(step=0.1, attention="flash")], "flash") == []


@pytest.mark.parametrize("value", [NAN, None, 0.0, -1.0])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_tables_of_any_values(value, number):
    names = ("sdpa", "standard")[:number]
    rows = [Row({**AXES, "attention": n}, "ok", None, {c.name: value for c in COLUMNS}, {1: value}) for n in names]
    if value is None:
        rows = [replace(each, losses={}) for each in rows]
    text = to_markdown(rows, "title")
    assert [line.count("sdpa") for line in lines_of(text)[2:3]] == [1] * min(number, 1)
    assert len(lines_of(by_length(rows))) == 2 + min(number, 1)
    read = from_csv(to_csv(rows), losses_to_csv(rows))
    assert repr([each.losses for each in read]) == repr([each.losses for each in rows])


def test_csv_has_a_row_for_every_trial_with_all_digits():
    lines = list(csv.DictReader(io.StringIO(to_csv([row(step=1 / 3), ROWS[-1]]))))
    assert [line["status"] for line in lines] == ["ok", "oom"]
    assert float(lines[0]["step_seconds"]) == 1 / 3 and lines[0]["mfu"] == ""
    assert lines[1]["reason"] == "out of | memory\nhere" and lines[1]["seq_len"] == "256"


def test_csv_is_read_back_with_its_losses():
    read = from_csv(to_csv(ROWS), losses_to_csv(ROWS))
    assert [(r.axes, r.status, r.reason, r.losses) for r in read] == [
        (r.axes, r.status, r.reason, r.losses) for r in ROWS
    ]
    assert read[0].measured == {name: value for name, value in ROWS[0].measured.items() if value is not None}
    assert [r.losses for r in from_csv(to_csv(ROWS))] == [{}] * len(ROWS)
    assert from_csv(to_csv([]), losses_to_csv([])) == []


def test_all_rows_equal_to_the_best_after_rounding_are_bold():
    rows = [row(attention=name, peak=peak) for name, peak in (("standard", 1.2), ("sdpa", 1.0004), ("flash", 1.0))]
    assert [line.count("**1.00**") for line in lines_of(to_markdown(rows, "title"))[2:]] == [0, 1, 1]


def test_table_without_a_finished_trial():
    text = to_markdown([row("failed", "a bug")], "title")
    assert "Times are" not in text and "| 64 | sdpa | failed | a bug |" in text
    assert to_csv([]).startswith("status,reason,ran,step_seconds")
