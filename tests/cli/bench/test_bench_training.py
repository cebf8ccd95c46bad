"""Training compared with its peer: what is recorded, and no rate where the losses differ."""

import json

import pytest
import torch

from flash_train.cli import bench_training
from flash_train.cli.bench_training import TrainingCase, main
from flash_train.model import ModelConfig
from tests.support.tiers import slow_after

TINY = ModelConfig(64, n_layers=2, width=32, n_heads=2, n_kv_heads=2, head_dim=16, mlp_width=64, tied_embeddings=False)


@pytest.fixture
def small(monkeypatch):
    """Tiny models on the CPU. The peer is another run of ours; `factor[0]` scales its losses; None makes it fail."""
    factor = [1.0]

    def peer(case, weights):
        if factor[0] is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")
        found = bench_training.train_ours(case, weights)
        return found | {"losses": [loss * factor[0] for loss in found["losses"]]}

    monkeypatch.setattr(bench_training, "shape", lambda: TINY)
    monkeypatch.setattr(bench_training, "VOCAB_SIZE", TINY.vocab_size)
    monkeypatch.setattr(bench_training, "CASES", (TrainingCase(32, "none", 3), TrainingCase(64, "selective", 3)))
    monkeypatch.setattr(bench_training, "ATTENTION", "sdpa")
    monkeypatch.setattr(bench_training, "unavailable", lambda: None)
    monkeypatch.setitem(bench_training.IMPLEMENTATIONS, "transformers", peer)
    return factor


def test_the_model_has_the_shape_of_the_published_peer():
    shape = bench_training.shape()
    assert (shape.vocab_size, shape.n_layers, shape.width, shape.mlp_width) == (32768, 24, 2048, 5632)
    assert shape.num_parameters == 1_367_443_456


def test_records_are_kept_and_not_measured_again(small, tmp_path, capsys):
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


@pytest.mark.parametrize("factor, said", slow_after(1, [(1.01, "9.9e-03"), (float("nan"), "nan")], unpack=True))
def test_no_rate_where_losses_differ(small, tmp_path, capsys, factor, said):
    small[0] = factor
    out = tmp_path / "training.json"
    assert main(["--out", str(out), "--only", "n32-"]) == 1
    assert f"flash_train none (the losses differ by {said})" in capsys.readouterr().out
    assert not any("tokens_per_second" in record for record in json.loads(out.read_text())["records"])


@pytest.mark.slow
def test_a_run_that_fails_is_recorded(small, tmp_path, capsys):
    small[0] = None
    out = tmp_path / "training.json"
    assert main(["--out", str(out)]) == 1
    assert "transformers none (CUDA out of memory. Tried to allocate)" in capsys.readouterr().out
    records = json.loads(out.read_text())["records"]
    assert [record["reason"][:9] for record in records] == ["the other", "CUDA out "] * 2
    assert len(records[0]["losses"]) == 3


def test_mistakes_end_before_anything_is_measured(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["--only", "n17"])
    assert "--only 'n17' is part of no case's name; names are like 1b3-n16384-none" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="3"):
        main([])
    assert capsys.readouterr().err == "flash-train: bench_training: needs an NVIDIA GPU, and there is none\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="3"):
        main([])
    assert "needs transformers and liger_kernel: pip install" in capsys.readouterr().err
