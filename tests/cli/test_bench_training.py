"""Training beside its peer: what is recorded, and that no rate is told where losses differ."""

import json

import pytest

from flash_train.cli import bench_training
from flash_train.cli.bench_training import TrainingCase, main
from flash_train.model import ModelConfig

TINY = ModelConfig(64, n_layers=2, width=32, n_heads=2, n_kv_heads=2, head_dim=16, mlp_width=64, tied_embeddings=False)


@pytest.fixture
def small(monkeypatch):
    """Two steps of a tiny model on the CPU, the peer being another run of ours, whose losses may be bent."""
    bend = [1.0]

    def peer(case, weights):
        found = bench_training.train_ours(case, weights)
        return found | {"losses": [loss * bend[0] for loss in found["losses"]]}

    monkeypatch.setattr(bench_training, "shape", lambda: TINY)
    monkeypatch.setattr(bench_training, "VOCAB_SIZE", TINY.vocab_size)
    monkeypatch.setattr(bench_training, "CASES", (TrainingCase(32, "none", 3), TrainingCase(64, "selective", 3)))
    monkeypatch.setattr(bench_training, "ATTENTION", "sdpa")
    monkeypatch.setitem(bench_training.IMPLEMENTATIONS, "transformers", peer)
    return bend


def test_the_shape_is_that_of_the_published_peer():
    shape = bench_training.shape()
    assert (shape.vocab_size, shape.n_layers, shape.width, shape.mlp_width) == (32768, 24, 2048, 5632)
    assert shape.num_parameters == 1_367_443_456


def test_records_and_goes_on(small, tmp_path, capsys):
    out = tmp_path / "training.json"
    arguments = ["--out", str(out), "--commit", "c0ffee"]
    assert main([*arguments, "--only", "n32-"]) == 0
    assert "ratio" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "n32-" not in capsys.readouterr().out  # done before
    records = json.loads(out.read_text())["records"]
    assert [(r["seq_len"], r["implementation"]) for r in records] == [
        (length, name) for length in (32, 64) for name in ("flash_train", "transformers")
    ]
    ours, theirs = records[:2]
    assert ours["losses"] == theirs["losses"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["tokens_per_second"] == pytest.approx(32 / ours["step_seconds"])
    assert ours["ratio_to_transformers"] == pytest.approx(ours["tokens_per_second"] / theirs["tokens_per_second"])
    assert ours["forward_seconds"] + ours["backward_seconds"] + ours["optimizer_seconds"] < ours["step_seconds"]
    assert ours["commit"] == "c0ffee"


def test_no_rate_where_losses_differ(small, tmp_path, capsys):
    small[0] = 1.01
    out = tmp_path / "training.json"
    assert main(["--out", str(out), "--only", "n32-"]) == 1
    assert "no rate, since the losses differ by 9.9e-03" in capsys.readouterr().out
    assert {record["tokens_per_second"] for record in json.loads(out.read_text())["records"]} == {None}
