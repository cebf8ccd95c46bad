"""Runs, ablations and searches become records, and their tables."""

import json
import shutil
from dataclasses import replace

import pytest

from flash_train.cli.collect_runs import join_trials
from flash_train.cli.collect_runs import main as collect_runs
from flash_train.files import write_json, write_text
from flash_train.profiling.ablation.row import Row
from flash_train.profiling.ablation.table import losses_to_csv, to_csv
from flash_train.profiling.memory.longest import Longest, from_record, to_record
from flash_train.profiling.memory.longest import Row as LongestRow
from scripts.update_readme import TABLES, update
from tests.support.pages import marked


def test_runs_are_collected(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    summary = {"seq_len": 8, "tokens_per_second": 1.0, "run_dir": "x", "wandb_dir": None, "versions": {"commit": None}}
    (run / "summary.json").write_text(json.dumps(summary | {"status": "finished"}))
    (run / "config.yaml").write_text("optimizer: {master: exact}\nbatch_size: 2\n")
    (run / "metrics.csv").write_text("step,train/loss\n" + "".join(f"{i},{float(i)}\n" for i in range(1, 13)))
    assert collect_runs([str(run), "--out", str(tmp_path / "out.json"), "--commit", "abc"]) == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    assert record["train_loss_last_10"] == 7.5  # of 3 … 12
    assert (record["master"], record["batch_size"], record["cuda_graph"]) == ("exact", 2, None)
    assert record["versions"]["commit"] == "abc"
    assert "run_dir" not in record and "kernel_kinds" not in record


def test_the_kernels_of_the_last_profiled_step_are_collected(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    summary = {"status": "finished", "run_dir": "x", "wandb_dir": None, "versions": {"commit": None}}
    write_json(run / "summary.json", summary | {"model": "nano", "seq_len": 8, "tokens_per_second": 1.0})
    (run / "config.yaml").write_text("trainer: {cuda_graph: true}\n")
    (run / "metrics.csv").write_text("step,train/loss\n1,1.0\n")
    for step, seconds in ((10, 1.0), (20, 2.0)):
        (folder := run / "kernels" / f"step-{step:06}").mkdir(parents=True)
        kinds = [{"kind": "norms", "seconds": seconds, "launches": step}]
        write_json(folder / "kernels.json", {"kinds": kinds, "kernels": [], "busy_seconds": seconds})
    assert collect_runs([str(run), "--out", str(tmp_path / "out.json")]) == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    assert (record["busy_seconds"], record["kernel_kinds"][0]["launches"]) == (2.0, 20)


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (None, "has no summary.json"),
        ({"status": "interrupted"}, "the run is interrupted; allowed: one that has finished"),
        ({"status": "finished"}, "metrics.csv has no training losses"),
    ],
)
def test_a_run_without_a_result_is_refused(tmp_path, capsys, summary, says):
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(SystemExit):
        collect_runs([str(tmp_path), "--out", str(tmp_path / "out.json")])
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and str(tmp_path) in line and not (tmp_path / "out.json").exists()


CELL = {"status": "finished", "device": "a card", "steps": 5, "peak_memory_of": "device", "versions": {"commit": None}}


def test_an_ablation_becomes_a_record_and_pages(tmp_path):
    run, root = tmp_path / "run", tmp_path / "root"
    rows = [
        Row(
            {"dropout": 0.1, "seq_len": n, "attention": name},
            "ok",
            None,
            {"step_seconds": seconds, "peak_memory_gib": 3.0},
            {1: 4.0, 2: 2.0 * seconds},
            name,
        )
        for n, name, seconds in ((1024, "flash", 0.5), (1024, "standard", 1.5), (4096, "flash", 2.0))
    ]
    rows.append(Row({"dropout": 0.1, "seq_len": 4096, "attention": "standard"}, "oom", "too long, a | in it"))
    write_text(run / "ablation.csv", to_csv(rows))
    write_text(run / "ablation_losses.csv", losses_to_csv(rows))
    write_json(run / "cells" / "one" / "summary.json", CELL | {"status": "failed", "steps": 0})
    with pytest.raises(SystemExit):
        collect_runs([str(run), "--out", str(tmp_path / "none.json")])
    write_json(run / "cells" / "two" / "summary.json", CELL)
    write_text(run / "cells" / "two" / "config.yaml", "{seed: 7, batch_size: 2, data: {corpus: text}}")
    out = root / "docs" / "results" / "ablation.json"
    assert collect_runs([str(run), "--add", "--out", str(out), "--commit", "abc"]) == 0
    records = json.loads(out.read_text())["records"]
    assert [record["axes"] for record in records] == [dict(row.axes) for row in rows]
    assert {record["steps"] for record in records} == {5}
    assert records[0]["measured"] == rows[0].measured and records[0]["versions"] == {"commit": "abc"}

    (root / "README.md").write_text(marked("ablation"))
    (root / "docs" / "ablation.md").write_text(marked("ablation.details") + marked("ablation.picture"))
    assert update(root, check=True) == 1
    assert update(root, check=False) == 0 and update(root, check=True) == 0
    short, page = (root / "README.md").read_text(), (root / "docs" / "ablation.md").read_text()
    assert "| seq_len | flash: ms · GiB | standard: ms · GiB |" in short
    assert "| 1,024 | 500.0 · 3.0 | 1,500 · 3.0 |\n| 4,096 | 2,000 · 3.0 | oom |\n" in short
    assert "seq_len=1024: largest relative difference 6.7e-01, because dropout masks differ between backends" in page
    assert (
        "Every trial has dropout=0.1, 5 steps, data=text, seed=7, batch_size=2." in page
        and "commit abc." in page
        and "0.33" in page
        and "a \\| in it" in page
    )
    picture = root / "docs" / "results" / "ablation.png"
    assert "results/ablation.png" in page and picture.is_file()

    picture.unlink()
    assert update(root, check=True) == 1
    assert update(root, check=False) == 0 and picture.is_file()
    again = tmp_path / "again"
    shutil.copytree(run, again)
    write_text(again / "ablation.csv", to_csv([replace(rows[0], measured={"step_seconds": 0.25})]))
    assert collect_runs([str(again), "--add", "--out", str(out), "--commit", "def"]) == 0
    joined = json.loads(out.read_text())["records"]
    assert [record["axes"] for record in joined] == [record["axes"] for record in records]
    assert [record["versions"]["commit"] for record in joined] == ["def", "abc", "abc", "abc"]
    assert joined[0]["measured"]["step_seconds"] == 0.25
    assert update(root, check=False) == 0
    assert "commits def, abc." in (root / "docs" / "ablation.md").read_text()

    shorter = {**records[1], "axes": {**records[1]["axes"], "attention": "chunked"}, "steps": 2}
    write_json(out, {"records": [*records, shorter]})
    assert update(root, check=False) == 0
    page = (root / "docs" / "ablation.md").read_text()
    assert "no losses: seq_len=1024 attention=chunked (2)." in page and page.count("largest relative") == 1
    assert "5 steps (fewer in the trials listed at the end)" in page
    out.unlink()
    assert update(root, check=True) == 1
    assert update(root, check=False) == 0 and update(root, check=True) == 0
    assert (root / "README.md").read_text() == marked("ablation") and not picture.exists()


def test_ablations_are_joined_in_the_order_of_their_axes():
    def cell(seq_len, attention, status="ok", dropout=0.0):
        return {"axes": {"dropout": dropout, "seq_len": seq_len, "attention": attention}, "status": status}

    given = [
        cell(2048, "standard"),
        cell(2048, "flash", "failed"),
        cell(1024, "flash"),
        cell(1024, "flash", dropout=0.1),
    ]
    given += [cell(2048, "flash"), cell(1024, "standard")]
    expected = [cell(n, name) for n in (1024, 2048) for name in ("standard", "flash")]
    assert join_trials(given) == [*expected, cell(1024, "flash", dropout=0.1)]


def test_an_ablation_without_a_seed_axis_is_joined_with_one_that_has_it():
    def cell(attention, **seed):
        return {"axes": {**seed, "seq_len": 64, "attention": attention}, "status": "ok", "settings": ["seed=3"]}

    joined = join_trials([cell("sdpa"), cell("flash"), cell("flash", seed=3), cell("flash", seed=4)])
    assert [record["axes"] for record in joined] == [
        {"seed": seed, "seq_len": 64, "attention": name} for seed, name in ((3, "sdpa"), (3, "flash"), (4, "flash"))
    ]


def test_an_ablation_without_the_axis_of_parallel_plans_is_measured_again():
    old = {"axes": {"seq_len": 64, "attention": "flash"}, "status": "failed", "settings": ["seed=3"]}
    new = {"axes": {"seed": 3, "seq_len": 64, "parallel": "auto", "attention": "flash"}, "status": "ok"}
    other = {"axes": {"seed": 3, "seq_len": 64, "parallel": "none", "attention": "flash"}, "status": "ok"}
    assert join_trials([old, new, other]) == [new, other]


def test_searches_become_a_record_and_pages(tmp_path):
    rows = [
        LongestRow("flash", "none", Longest(65536, 66560, ((65536, True), (66560, False))), 66000, 139.2, True, 2**20),
        LongestRow("standard", "none", Longest(0, 64, ((64, False),)), 9000, None, False, 2**20, "oom", "no room"),
    ]
    rows = [replace(row, optimizer="exact", step_seconds=9.5, device="a card") for row in rows]
    runs = [tmp_path / row.attention for row in rows]
    for run, row in zip(runs, rows, strict=True):
        found = {"device": "a card", "versions": {"commit": None, "gpu": "a card"}, "records": [to_record(row, 0.02)]}
        write_json(run / "find_max.json", found)
    root = tmp_path / "root"
    out = root / "docs" / "results" / "find_max.json"
    assert collect_runs([*map(str, runs), "--out", str(out), "--commit", "abc"]) == 0
    records = json.loads(out.read_text())["records"]
    assert list(map(from_record, records)) == rows and records[1]["versions"] == {"commit": "abc", "gpu": "a card"}
    (root / "README.md").write_text(marked("find_max"))
    assert update(root, check=False) == 0
    assert "| 1b3 | flash | none | exact | 65,536 | 139.2 | 66,000 | 9.5 | 2 |" in (root / "README.md").read_text()
    assert (root / "docs" / "results" / "find_max.png").is_file()
    assert "MLP in tiles" not in (root / "README.md").read_text()
    other = [record | {"device": "another card", "seq_len": 640} for record in records[:1]]
    write_json(
        runs[0] / "find_max.json", {"device": "another card", "versions": {"gpu": "another card"}, "records": other}
    )
    assert collect_runs([str(runs[0]), "--out", str(out), "--add"]) == 0  # replaces no record of the first card
    assert update(root, check=False) == 0
    text = (root / "README.md").read_text()
    assert (
        text.index("trains on a card")
        < text.index("| 65,536 |")
        < text.index("on another card")
        < text.index("| 640 |")
    )
    for record in records:
        del record["optimizer"]  # records that were measured before recomputed blocks had tiles
    assert "MLP in tiles" in TABLES["find_max"](records)
