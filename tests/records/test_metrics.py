"""Records are whole at any moment and keep every digit; plots are drawn from one row or thousands."""

import json
import os

import numpy as np
import pytest
import torch

from flash_train.files import write_bytes, write_json, write_text
from flash_train.records import MetricsTable, plot_run, plots, read_column

pytestmark = pytest.mark.pictures


@pytest.mark.parametrize(("write", "old", "new"), [(write_text, "old\n", "new\n"), (write_bytes, b"old\n", b"new\n")])
def test_file_is_replaced_atomically(tmp_path, monkeypatch, write, old, new):
    path = tmp_path / "new" / "a.txt"
    write(path, old)

    def fail(*arguments):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "replace", fail)
        write(path, new)
    assert path.read_bytes() == b"old\n"
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def test_json_has_no_nan(tmp_path):
    write_json(
        tmp_path / "a.json", {"loss": float("nan"), "nested": [float("inf"), 1.5, {"x": None}], "path": tmp_path}
    )
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {
        "loss": None,
        "nested": [None, 1.5, {"x": None}],
        "path": str(tmp_path),
    }


def test_table_keeps_every_digit_and_grows_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    assert path.read_text() == "step\n"
    table.write(1, {"train/loss": 0.1 + 0.2, "mfu": None})
    table.write(2, {"train/loss": 1e-300, "mfu": None})
    assert path.read_text() == "step,train/loss,mfu\n1,0.30000000000000004,\n2,1e-300,\n"
    table.write(2, {"val/loss": 3.5})  # joins the row of its step
    table.write(3, {"val/loss": 4.0, "train/loss": 1 / 3})
    assert path.read_text().splitlines() == [
        "step,train/loss,mfu,val/loss",
        "1,0.30000000000000004,,",
        "2,1e-300,,3.5",
        "3,0.3333333333333333,,4.0",
    ]
    assert table.column("val/loss") == ([2, 3], [3.5, 4.0])
    assert table.column("nothing") == ([], [])


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(1.5), np.int64(3), torch.tensor(1.5), 3, True])
def test_numbers_of_other_types_are_read_back(value, tmp_path):
    """A module's FLOPs may be a NumPy number, whose repr names its type."""
    table = MetricsTable(tmp_path / "metrics.csv")
    table.write(1, {"throughput/mfu": value})
    table.write(2, {"throughput/mfu": value})
    assert table.column("throughput/mfu") == read_column(table.path, "throughput/mfu") == ([1, 2], [float(value)] * 2)


def test_table_continues_at_the_checkpoints_step(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path)
    for step in range(1, 6):
        table.write(step, {"train/loss": step / 7})
    before = path.read_text().splitlines()
    again = MetricsTable(path, up_to_step=3)
    assert path.read_text().splitlines() == before[:4]
    again.write(4, {"train/loss": 9.0})
    assert path.read_text().splitlines() == [*before[:4], "4,9.0"]
    assert MetricsTable(path).rows == again.rows


def test_table_survives_a_line_cut_by_a_crash(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,a,b\n1,0.5,0.25\n2,0.")
    assert MetricsTable(path).rows == {1: {"a": 0.5, "b": 0.25}}
    assert path.read_text() == "step,a,b\n1,0.5,0.25\n"


def test_a_column_is_read_while_a_run_writes(tmp_path):
    path = tmp_path / "metrics.csv"
    assert read_column(path, "a") == ([], []) and not path.exists()
    table = MetricsTable(path)
    table.write(1, {"a": 0.5, "b": None})
    with open(path, "a", encoding="utf-8") as file:
        file.write("2,0.25,1")  # of 1e-05, say
    before = path.stat()
    assert read_column(path, "a") == ([1], [0.5]) and read_column(path, "b") == ([], [])
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)


def test_file_that_is_not_a_table_is_refused(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("name,value\nx,1\n")
    with pytest.raises(ValueError, match="first column is not 'step'"):
        MetricsTable(path)
    assert path.read_text() == "name,value\nx,1\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"step,a\n1,0.5\ntwo,0.5\n", "damaged in line 3"),
        (b"step,a\n1,0.5\n2,x\n", "damaged in line 3"),
        (b"step,a\n1,0.5,7\n", r"damaged in line 2 \(it has 3 fields and the header 2\)"),
        (b"step,a\n1\n", r"damaged in line 2 \(it has 1 field and the header 2\)"),
        (b"step,a\n1," + b"x" * 1000 + b"\n", r"damaged in line 2 \([^)]{81}\);"),
        (b"step,a\n1,\xff\n", "is damaged"),
        (b"step,a\n\0\0\0\n", "is damaged"),
        (b"\n", "first column is not 'step'"),
    ],
)
def test_a_damaged_table_names_the_file_and_the_line(tmp_path, content, says):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        MetricsTable(path)
    assert str(caught.value).startswith(f"{path} is ") and "restore it, or move it away" in str(caught.value)
    assert path.read_bytes() == content


def test_a_folder_in_place_of_the_table_is_named(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(ValueError, match=r"metrics.csv is a folder, .*move it away"):
        read_column(tmp_path / "metrics.csv", "a")


@pytest.mark.parametrize("rows", [1, 40, 1000])
@pytest.mark.parametrize("cuda", [True, False])
def test_plots(rows, cuda, tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv")
    memory = ["allocated_gib", "reserved_gib", "peak_gib"] if cuda else ["process_gib", "process_peak_gib"]
    names = ["train/loss", "throughput/tokens_per_second", "time/step_seconds", "time/data_wait_seconds"]
    names += [f"memory/{name}" for name in memory] + ["throughput/mfu"] * cuda
    table.columns += names
    table.rows = {step: dict.fromkeys(names, 1 + step / 7) for step in range(1, rows + 1)}
    written = plot_run(table, tmp_path, title="nano, 1,024 tokens")
    assert [path.name for path in written] == ["loss.png", "throughput.png", "memory.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)
    assert not list(tmp_path.glob(".*"))


def test_an_empty_table_draws_nothing(tmp_path):
    assert plot_run(MetricsTable(tmp_path / "metrics.csv"), tmp_path) == []


METRICS = ("train/loss", "throughput/tokens_per_second", "throughput/mfu", "time/step_seconds", "memory/process_gib")
NAN, INFINITE = float("nan"), float("inf")


def drawn(folder, values, names=METRICS):
    """The pictures of a table with one of the values in each row, and the table's own file."""
    table = MetricsTable(folder / "metrics.csv")
    for step, value in enumerate(values, 1):
        table.write(step, dict.fromkeys(names, value))
    written = [path.name for path in plot_run(table, folder)]
    assert {path.name for path in folder.iterdir()} == {*written, "metrics.csv"}
    return written


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values", [[NAN], [NAN, NAN], [INFINITE], [0.0], [-1.0], [1.0, NAN, 2.0, -INFINITE], [NAN] * 300]
)
def test_plots_of_values_that_no_axis_can_show(values, tmp_path):
    assert drawn(tmp_path, values) == ["loss.png", "throughput.png", "memory.png"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("val/loss", ["loss.png"]),  # a run that stopped before its first logged row has a validation alone
        ("train/loss", ["loss.png"]),
        ("time/step_seconds", ["throughput.png"]),
        ("throughput/mfu", ["throughput.png"]),
        ("memory/allocated_gib", ["memory.png"]),
        ("train/gradient_norm", []),
    ],
)
def test_table_of_one_metric_draws_the_plot_of_that_metric(name, written, tmp_path):
    assert drawn(tmp_path, [1.0], [name]) == written


def test_columns_without_any_value_draw_nothing(tmp_path):
    assert drawn(tmp_path, [None, None]) == []


def test_panel_without_a_finite_value_has_a_note(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(plots, "say_empty", said.append)
    drawn(tmp_path, [NAN], ["throughput/tokens_per_second"])
    assert [panel.get_ylabel() for panel in said] == ["tokens per second", "seconds per step"]


def test_plot_of_removed_rows_is_removed(tmp_path):
    (tmp_path / "loss.png").write_bytes(b"of an earlier run")
    assert drawn(tmp_path, [1.0], ["time/step_seconds"]) == ["throughput.png"]


def test_plot_that_cannot_be_written_keeps_the_old_one(tmp_path, monkeypatch):
    table = MetricsTable(tmp_path / "metrics.csv")
    table.write(1, {"train/loss": 1.0})
    (picture,) = plot_run(table, tmp_path)
    before = picture.read_bytes()

    def fail(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        plot_run(table, tmp_path)
    assert picture.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "metrics.csv"}
