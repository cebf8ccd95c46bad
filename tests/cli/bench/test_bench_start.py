"""The time from a command to its first step, and runs that take no step."""

import json

import pytest

from flash_train.cli import bench_start
from flash_train.cli.bench.records import COMPARED_VERSIONS
from flash_train.cli.bench_start import StartCase, main

TINY = ("hardware=cpu", "model=nano", "seq_len=128", "data=recall")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench_start, "CASES", (StartCase("tiny", TINY), StartCase("other", TINY)))


@pytest.mark.slow
def test_each_start_is_measured_in_a_new_process(tiny, tmp_path, capsys):
    out = tmp_path / "start.json"
    assert main(["--out", str(out), "--only", "tiny", "--rounds", "1", "--commit", "c0ffee"]) == 0
    cold, warm = json.loads(out.read_text())["records"]
    for record, cache in ((cold, "cold"), (warm, "warm")):
        assert (record["case"], record["cache"], record["commit"]) == ("tiny", cache, "c0ffee")
        assert record["rounds"] == [record["seconds"]] and record["seconds"] > 1  # as it imports PyTorch
    assert f"tiny: cold {cold['seconds']:.1f} s, warm {warm['seconds']:.1f} s" in capsys.readouterr().out


def test_each_round_begins_with_empty_caches_and_the_median_counts(tiny, tmp_path, monkeypatch):
    caches, seconds = [], iter((100.0, 3.0, 1.0, 9.0, 2.0, 4.0, 1.5))

    def first_step(overrides, run_dir, folder):
        caches.append(folder)
        return next(seconds)

    monkeypatch.setattr(bench_start, "first_step", first_step)
    found = bench_start.measure(bench_start.CASES[0], 3, dict.fromkeys(COMPARED_VERSIONS))
    assert [(r["cache"], r["seconds"], r["rounds"]) for r in found] == [
        ("cold", 4.0, [3.0, 9.0, 4.0]),
        ("warm", 1.5, [1.0, 2.0, 1.5]),
    ]
    assert caches[1::2] == caches[2::2] and len(set(caches)) == 4  # a warm start finds the caches of the cold one


def test_a_run_that_takes_no_step_is_an_error(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_start, "CASES", (StartCase("wrong", (*TINY, "model.width=-1")),))
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "start.json")])
    assert ended.value.code == 1
    assert "no step was taken: flash-train: model.width" in capsys.readouterr().err
    assert not (tmp_path / "start.json").exists()


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--only", "big"]])
def test_mistakes_name_the_option(arguments, tiny, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err
