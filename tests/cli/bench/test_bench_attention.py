"""The command of the attention benchmark: saving, resuming, the time limit, mistakes."""

import json

import pytest
import torch

from flash_train.attention.kernels import families
from flash_train.cli import bench_attention
from flash_train.cli.bench import records as benchmark
from flash_train.cli.bench.records import known_records
from flash_train.cli.bench_attention import main, measure_all
from flash_train.profiling.attention import peers
from flash_train.profiling.attention.cases import Case
from flash_train.profiling.attention.comparison import add_ratios

CASES = [Case(64, 2, 2, n, True) for n in (256, 512, 1024)]
HERE = {"commit": "abc", "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}


def record(case):
    return [{"case": case.name, "implementation": "triton", "direction": "forward", "tflops": 1.0}]


def run_cases(wanted, records, measure_case, save, time_limit):
    return benchmark.run_cases(wanted, records, measure_case, str, save, time_limit)


class Saved(list):
    """The names of the cases at each write of the file."""

    def __call__(self, records):
        self.append([row["case"] for row in records])


def test_the_file_is_written_after_every_case():
    saved = Saved()
    assert run_cases(CASES, [], record, saved, float("inf")) == []
    names = [case.name for case in CASES]
    assert saved == [names[:1], names[:2], names]


def test_finished_cases_are_not_measured_again():
    measured = []

    def measure_case(case):
        measured.append(case)
        return record(case)

    saved = Saved()
    assert run_cases(CASES, record(CASES[1]), measure_case, saved, float("inf")) == []
    assert measured == [CASES[0], CASES[2]]
    assert saved[-1] == [CASES[i].name for i in (1, 0, 2)]


def test_the_time_limit_stops_between_cases(monkeypatch):
    clock = iter(range(0, 1000, 10))  # the clock advances ten seconds each time it is read
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock))
    saved = Saved()
    left = run_cases(CASES, [], record, saved, 35.0)
    assert left == CASES[1:] and len(saved) == 1
    assert run_cases(left, record(CASES[0]), record, saved, 0.0) == left


def test_a_run_that_was_stopped_keeps_its_records(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"versions": HERE, "records": record(CASES[0])}))
    assert known_records(path, HERE) == record(CASES[0])
    assert known_records(tmp_path / "none.json", HERE) == known_records(None, HERE) == []


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"commit": "def"}, "differs in commit"),
        ({"gpu": "NVIDIA A100", "torch": "2.12.0"}, "differs in gpu, torch"),
        ({"commit": None}, "does not identify the code"),
        ({"commit": "abc-dirty"}, "does not identify the code"),
    ],
)
def test_records_of_another_commit_or_machine_are_not_kept(tmp_path, capsys, changed, said):
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"versions": HERE | changed, "records": record(CASES[0])}))
    assert known_records(path, HERE | (changed if "identify" in said else {})) == []
    assert said in capsys.readouterr().out


def test_records_have_commit_gpu_and_versions(monkeypatch):
    def measure(names, case, timer):
        return [
            {"case": case.name, "implementation": name, "direction": "forward", "tflops": timer(None)} for name in names
        ]

    monkeypatch.setattr(bench_attention, "measure", measure)
    rates = iter([3.0, 1.0, 2.0, 4.0])
    records = measure_all(CASES[0], HERE, lambda call: next(rates))
    assert [row["implementation"] for row in records] == ["triton", "fa2", "cudnn", "flex"]
    assert [records[0][f"ratio_to_{peer}"] for peer in ("fa2", "cudnn", "flex")] == [3.0, 1.5, 0.75]
    for row in records:
        assert HERE.items() <= row.items()
    rates = iter([3.0, 2.0])
    records = measure_all(CASES[0], HERE, lambda call: next(rates), ["cudnn", "triton", "varlen_attn"])
    assert [(row["implementation"], row["ratio_to_cudnn"]) for row in records] == [("triton", 1.5), ("cudnn", 1.0)]


def test_hopper_kernels_are_measured_if_they_can_run(monkeypatch):
    monkeypatch.setattr(families, "device_unavailable", lambda *_: None)
    assert [peers.implementations(case)[:2] for case in CASES] == [("hopper", "triton")] * len(CASES)
    rows = [
        {"implementation": name, "direction": "forward", "tflops": rate}
        for name, rate in (("hopper", 3.0), ("fa2", 2.0))
    ]
    add_ratios(rows)
    assert rows[0]["ratio_to_fa2"] == 1.5 and "ratio_to_hopper" not in rows[1]


def test_without_a_gpu_it_exits_with_3(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="3"):
        main([])
    assert capsys.readouterr().err == "flash-train: bench_attention: needs an NVIDIA GPU, and there is none\n"


@pytest.mark.parametrize("arguments", [["--only", "d77"], ["--rep", "many"], ["--time-limit", "soon"]])
def test_mistakes_end_in_one_line(capsys, arguments):
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flash-train: ")
