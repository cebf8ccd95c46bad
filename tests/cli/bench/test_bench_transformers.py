"""Attentions of transformers compared in one model: what is recorded, and no rate where a result is wrong."""

import json

import pytest

pytest.importorskip("liger_kernel")

from flash_train.cli import bench_transformers
from flash_train.cli.bench_transformers import TransformersCase, main

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Tiny models on the CPU, where PyTorch has no `varlen_attn`: `sdpa` takes its place."""
    names = bench_transformers.register_all() | {"varlen_attn": "sdpa"}
    monkeypatch.setattr(bench_transformers, "register_all", lambda: names)
    monkeypatch.setattr(bench_transformers, "SHAPE", TINY)
    monkeypatch.setattr(bench_transformers, "VOCAB_SIZE", 64)
    monkeypatch.setattr(bench_transformers, "log_normal_lengths", lambda n: (n // 4, n - n // 4))
    monkeypatch.setattr(bench_transformers, "CASES", (TransformersCase(48, 0.0, 2), TransformersCase(48, 0.1, 1)))
    monkeypatch.setattr(bench_transformers, "unavailable", lambda: None)
    return names


def test_each_attention_has_a_rate(small, tmp_path, capsys):
    out = tmp_path / "transformers.json"
    assert main(["--out", str(out), "--commit", "c0ffee"]) == 0
    assert "packed-n48-p0.1: flash_train" in capsys.readouterr().out
    records = json.loads(out.read_text())["records"]
    assert [(r["dropout"], r["implementation"]) for r in records] == [
        (0.0, "flash_train"), (0.0, "sdpa"), (0.0, "varlen_attn"), (0.1, "flash_train"), (0.1, "sdpa"),
    ]  # fmt: skip
    ours, sdpa, _ = records[:3]
    assert 0 < ours["hidden_error"] < 2 * sdpa["hidden_error"]
    assert ours["first_loss"] == pytest.approx(sdpa["first_loss"], rel=1e-3)
    assert ours["tokens_per_second"] == pytest.approx(48 / ours["step_seconds"])
    fastest = max(record["tokens_per_second"] for record in records[1:3])
    assert ours["ratio_to_fastest_peer"] == pytest.approx(ours["tokens_per_second"] / fastest)


def test_no_rate_for_a_wrong_attention(small, tmp_path, capsys):
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def wrong(module, query, key, value, attention_mask, **_):
        return value.transpose(1, 2).contiguous(), None

    AttentionInterface.register("wrong", wrong)
    AttentionMaskInterface.register("wrong", lambda *_, **__: None)
    small["varlen_attn"] = "wrong"
    out = tmp_path / "transformers.json"
    assert main(["--out", str(out), "--only", "p0"]) == 1
    assert "varlen_attn none (hidden states have an error of" in capsys.readouterr().out
    rates = {r["implementation"]: "tokens_per_second" in r for r in json.loads(out.read_text())["records"][:3]}
    assert rates == {"flash_train": True, "sdpa": True, "varlen_attn": False}
