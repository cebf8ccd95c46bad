"""The benchmark of rows that GPUs share: what it records, and that wrong results get no rate."""

import json

import pytest
import torch
import torch.distributed as dist

from flash_train.cli.bench import parallel_training
from flash_train.cli.bench.parallel_cases import long_cases
from flash_train.cli.bench_parallel import main, shown
from flash_train.profiling.attention import shared
from flash_train.profiling.attention.shared import measure_shared, scaling_cases, shared_cases
from flash_train.profiling.memory.prediction import predict
from tests.support.processes import run_ranks

MODULE = "flash_train.cli.bench_parallel"


@pytest.mark.slow
def test_two_ranks_measure_each_way_and_write_records(tmp_path):
    out = run_ranks(MODULE, 2, "attention", "--tiny", "--only", "seed3", "--out", tmp_path / "parallel.json")
    found = json.loads((tmp_path / "parallel.json").read_text())
    names = ["h4/1-packed128-seed3", "h4/1-packed128-seed3-dropout0.1"]
    assert [line.split(": ")[0] for line in out.splitlines()] == names  # from the first rank alone
    assert [(r["case"], r["way"], r["direction"]) for r in found["records"]] == [
        (name, way, direction)
        for name in names
        for way in ("one", "gather", "ulysses")
        for direction in ("forward", "forward+backward")
    ]
    for record in found["records"]:
        assert record["ranks"] == 2 and record["share"] > 0 and 0 <= record["error"] < 1e-5
        assert record["way"] != "one" or record["share"] == 1.0
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_rows_that_grow_with_the_ranks(tmp_path):
    names = [case.name for case in scaling_cases(4) if not case.dropout]
    packed = [f"h64/8-packed32768-seed{seed}" for seed in range(3)]
    assert names == ["h64/8-n32768", *packed, "h64/8-n262144", "h64/8-packed262144-seed1"]
    run_ranks(MODULE, 2, "scaling", "--tiny", "--only", "seed2", "--out", tmp_path / "parallel.json")
    records = json.loads((tmp_path / "parallel.json").read_text())["records"]
    assert {r["case"] for r in records} == {"h8/1-packed256-seed2", "h8/1-packed256-seed2-dropout0.1"}
    assert all(record["error"] < 1e-5 and record["tflops"] > 0 for record in records)


@pytest.mark.slow
def test_training_on_two_ranks_agrees_with_the_peer(tmp_path):
    run_ranks(MODULE, 2, "training", "--tiny", "--out", tmp_path / "parallel.json")
    records = json.loads((tmp_path / "parallel.json").read_text())["records"]
    assert [(r["case"], r["way"]) for r in records] == [
        *(("tiny-n64-sharded", way) for way in ("flash_train", "transformers")),
        ("tiny-n64-context", "flash_train"),
        *(("tiny-n64-replicated", way) for way in ("flash_train", "one")),
    ]
    for ours, other in ((records[0], records[1]), (records[3], records[4])):
        assert ours["losses"][0] == pytest.approx(other["losses"][0], rel=1e-4)
        assert ours["ratio"] == pytest.approx(other["step_seconds"] / ours["step_seconds"])
    sharded, _, shared, *_ = records
    assert sharded["tokens_per_second"] == pytest.approx(2 * 64 / sharded["step_seconds"])
    assert shared["tokens_per_second"] == pytest.approx(64 / shared["step_seconds"])


@pytest.mark.slow
def test_work_that_grows_with_the_ranks_is_one_file_of_several_starts(tmp_path):
    file = tmp_path / "parallel.json"
    for ranks in (1, 2):
        run_ranks(MODULE, ranks, "weak", "--tiny", "--commit", "abc", "--out", file)
    records = json.loads(file.read_text())["records"]
    assert [(r["case"], r["tokens"], r["documents"]) for r in records] == [
        *(("tiny-n64-sharded-x1", 64, 1), ("tiny-packed64-context-x1", 64, 2)),
        *(("tiny-n64-sharded-x2", 64, 1), ("tiny-packed64-context-x2", 128, 4)),
    ]
    for record in records:  # each GPU has 64 tokens in a step
        assert record["tokens_per_second"] == pytest.approx(record["ranks"] * 64 / record["step_seconds"])


@pytest.mark.slow
def test_a_long_row_after_a_short_one(tmp_path):
    run_ranks(MODULE, 2, "long", "--tiny", "--out", tmp_path / "parallel.json")
    (record,) = json.loads((tmp_path / "parallel.json").read_text())["records"]
    assert record["case"] == "tiny-n128-long-x2" and len(record["losses"]) == 2
    assert record["memory"] == "selective" and record["offload"] == 0
    assert record["tokens_per_second"] == pytest.approx(128 / record["step_seconds"])


def test_a_long_row_takes_from_the_host_what_the_card_has_not(monkeypatch):
    monkeypatch.setattr(parallel_training, "total_memory_of_rank", lambda *_: 78 * 2**30)
    monkeypatch.setattr(parallel_training, "host_memory_of_rank", lambda ranks: 560 * 2**30 // ranks)
    (case,) = long_cases(8)
    step = parallel_training.step_of(case, 8, torch.device("cpu"))
    assert case.seq_len == 2**20 and step.memory == "selective" and 0 < step.offload < 1
    assert predict(step).peak_bytes <= 70e9
    monkeypatch.setattr(parallel_training, "host_memory_of_rank", lambda ranks: 0)
    step = parallel_training.step_of(case, 8, torch.device("cpu"))
    assert (step.memory, step.offload) == ("checkpoint", 0)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_wrong_result_gets_no_rate(alone, monkeypatch):
    case = next(case for case in shared_cases(tiny=True) if case.dropout)
    assert all("ms" in record for record in measure_shared(case, alone, torch.device("cpu")))
    called = shared.shared_attention
    monkeypatch.setattr(shared, "shared_attention", lambda q, *rest, **options: called(q * 1.1, *rest, **options))
    records = measure_shared(case, alone, torch.device("cpu"))
    reasons = {(record["way"], record.get("reason")) for record in records}
    assert reasons == {("one", None), ("gather", "wrong result"), ("ulysses", "wrong result")}
    assert "gather wrong result · wrong result" in shown(records)


def test_without_torchrun_it_says_how_to_start(capsys):
    with pytest.raises(SystemExit):
        main(["attention"])
    assert "start it with torchrun --nproc-per-node GPUS" in capsys.readouterr().err
