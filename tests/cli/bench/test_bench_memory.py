"""The memory benchmark: whole cases on a CPU, and cases that do not fit."""

import json

import pytest
import torch

from flash_train.cli import bench_memory
from flash_train.cli.bench.memory_cases import (
    OTHERS,
    AttentionCase,
    StepCase,
    attention_cases,
    step_cases,
    traffic_cases,
)
from flash_train.cli.bench_memory import main, measure_step, verdict
from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.validate import validate
from tests.support.cli.runs import TINY_MODEL


@pytest.fixture
def data(tmp_path, corpus):
    """Overrides of the data alone."""
    return ["data=text", f"data.path={corpus}", f"data.cache_dir={tmp_path / 'cache'}"]


def read(path):
    return json.loads(path.read_text())["records"]


def test_measured_steps_are_compared_with_the_prediction(tmp_path, data, capsys):
    out = tmp_path / "memory.json"
    grid = ["--kinds=step", "--models=nano", "--lengths=128,256", "--memory=none,checkpoint", "--attention=sdpa"]
    assert main([*grid, "--commit=abc", f"--out={out}", *data]) == 0
    records = read(out)
    assert [record["case"] for record in records] == [
        f"nano-n{n}-{memory}-sdpa" for n in (128, 256) for memory in ("none", "checkpoint")
    ]
    for record in records:
        assert record["status"] == "ok" and record["left_bytes"] == 0 and record["commit"] == "abc"
        assert record["predicted_bytes"] == pytest.approx(record["measured_bytes"], rel=0.05)
        assert (record["model"], record["precision"], record["packing"]) == ("nano", "fp32", "best_fit")
    said = capsys.readouterr().out
    assert "4 of 4 steps within 5 % or 64 MiB" in said and "worst: nano-n" in said

    assert main([*grid, "--commit=abc", f"--out={out}", *data]) == 0  # all are recorded: none is measured again
    assert "MiB measured" not in capsys.readouterr().out and read(out) == records


def test_an_unavailable_backend_and_a_step_that_cannot_fit_are_not_run(monkeypatch, data):
    monkeypatch.setattr(bench_memory, "build", lambda *_: pytest.fail("it ran"))
    given = ("hardware=cpu", *data)
    record = measure_step(StepCase("a", ("model=nano", "attention=flash")), given)
    assert record["status"] == "unavailable" and "no NVIDIA GPU" in record["reason"]
    record = measure_step(StepCase("g", ("model=nano", "attention=sdpa", "trainer.cuda_graph=true")), given)
    assert record["status"] == "unavailable" and record["reason"] == "a CUDA graph needs an NVIDIA GPU"
    monkeypatch.setattr(bench_memory, "free_memory_of", lambda device: 2**20)
    record = measure_step(StepCase("b", ("model=nano", "attention=sdpa", "seq_len=4096")), given)
    assert record["status"] == "unavailable" and record["predicted_bytes"] > record["available_bytes"] == 2**20


def test_on_cuda_peaks_come_from_the_allocator_and_the_model_is_freed(monkeypatch, data):
    """Training runs on a CPU here; only the allocator's numbers pretend to be CUDA's."""
    stats = {f"{name}_bytes.all.peak": i for i, name in enumerate(("allocated", "requested", "reserved"))}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    kept = []
    built = bench_memory.build
    monkeypatch.setattr(bench_memory, "build", lambda *given: kept.append(built(*given)) or kept[0])
    overrides = ("hardware=cpu", "model=nano", *TINY_MODEL, "attention=sdpa", "seq_len=64", *data)
    found = bench_memory._run(compose_config((*bench_memory.FIXED, *overrides)), torch.device("cuda"))
    assert (found["measured_bytes"], found["requested_bytes"], found["reserved_bytes"]) == (0, 1, 2)
    assert kept[0].trainer.global_step == 2
    assert all(parameter.numel() == 0 and parameter.grad is None for parameter in kept[0].module.parameters())
    assert not any(optimizer.state for optimizer in kept[0].trainer.optimizers)


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("CUDA out of memory\nmore"), "oom"), (ValueError("odd"), "failed")]
)
def test_a_step_that_fails_is_recorded_and_fails_the_verdict(monkeypatch, data, error, status):
    def fit(*_, **__):
        raise error

    monkeypatch.setattr("lightning.pytorch.Trainer.fit", fit)
    case = StepCase("a", ("model=nano", *TINY_MODEL, "attention=sdpa", "seq_len=64"))
    record = measure_step(case, ("hardware=cpu", *data))
    assert record["status"] == status and "\n" not in record["reason"]
    words, good = verdict([record])
    assert not good and f"predicted to fit, but: a: {status}" in words


def test_a_prediction_that_is_off_fails_the_verdict():
    step = {"kind": "step", "status": "ok", "seconds": 1.0, "left_bytes": 0}
    near = step | {"case": "near", "measured_bytes": 2**30, "predicted_bytes": 2**30 + 60 * 2**20}
    far = step | {"case": "far", "measured_bytes": 2**32, "predicted_bytes": 2**32 - 300 * 2**20}
    assert verdict([near])[1]
    words, good = verdict([near, far])
    assert not good and "1 of 2 steps within" in words and "worst: far, -7.32% (-300 MiB)" in words
    assert "outside: far" in words


def test_attention_by_itself_and_its_traffic(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_memory.dram_traffic.shutil, "which", lambda name: None)
    own = [AttentionCase(name, n) for n in (64, 128) for name in ("flash", "sdpa", "standard")]
    monkeypatch.setattr(bench_memory, "attention_cases", lambda: own)
    out = tmp_path / "memory.json"
    assert main(["--kinds=attention,traffic", f"--out={out}"]) == 0
    records = {record["case"]: record for record in read(out)}
    assert records["attention-flash-n64"]["status"] == "unavailable"
    assert 0 < records["attention-sdpa-n128"]["own_bytes"] < records["attention-standard-n128"]["own_bytes"]
    traffic = records["traffic-forward-flash-n4096"]
    assert traffic["reason"] == "ncu is not installed" and traffic["algorithm_bytes"] > 10**8


def test_names_are_unique_and_every_case_composes():
    steps = list(step_cases(["125m", "1b3"], [2048, 4096], ["none"], ["flash", "standard"], True))
    names = [case.name for case in (*steps, *attention_cases(), *traffic_cases())]
    assert len(set(names)) == len(names) and len(steps) == 8 + len(OTHERS)
    for case in steps:
        config = compose_config(("hardware=cuda", *case.overrides))
        validate(config)
        build_model_config(config, 259, None)


@pytest.mark.parametrize("arguments", [["--only=nothing"], ["--kinds=", "--only=x"], ["--time-limit=soon"]])
def test_mistakes_end_in_one_line(capsys, arguments):
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flash-train: ")


def test_a_wrong_override_ends_in_one_line(capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["--kinds=step", "--models=nano", "--lengths=64", "seq_length=3"])
    assert "seq_length: no such key" in capsys.readouterr().err
