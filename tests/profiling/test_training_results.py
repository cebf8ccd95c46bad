"""The tables of training runs, from invented records and from the published ones."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from flash_train.attention.flops import attended_pairs
from flash_train.attention.kernels.families import HOPPER
from flash_train.model import ModelConfig, Transformer
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.profiling.training_results import fp8_table, kernels_table, long_rows_table, updates_table

ROOT = Path(__file__).parents[2]
ROW = {"model": "8b", "seq_len": 1024, "memory": "checkpoint", "steps": 1, "step_seconds": 2.0, "mfu": 0.5}
ROW |= {"peak_memory_gib": 9.0, "device": "a card", "master": None, "moments": None, "optimizer_offload": True}


def shape_of(model: str) -> ModelConfig:
    """A model of conf/model, with the vocabulary of bytes if it has none of its own."""
    shape = yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
    shape["vocab_size"] = shape["vocab_size"] or 320
    return ModelConfig.from_dict({key: value for key, value in shape.items() if value is not None and key != "name"})


def test_the_page_on_long_rows_has_the_flops_of_a_step():
    tokens, text = 524288, (ROOT / "docs" / "long_rows.md").read_text(encoding="utf-8")
    with torch.device("meta"):
        model = Transformer(shape_of("1b3"), attention="sdpa")
    for name, lengths in (("128 of 4,096 tokens", [4096] * 128), ("1 of 524,288 tokens", [tokens])):
        pairs = attended_pairs(lengths)
        row = f"| {name} | {pairs / 1e9:.3g} billion | {model.model_flops(tokens, pairs) / 1e15:.2g} |"
        assert row in text


def test_a_long_row_says_what_its_record_does_not_hold():
    text = long_rows_table([ROW])
    assert "| `8b` | 1,024 | `checkpoint` | defaults, on the host | 2.0 | 50.0% | 9.0 | – |\n" in text
    assert "does not hold how many inputs" in text.replace("\n", " ") and "predicted peaks" in text
    whole = ROW | {
        "master": "none",
        "moments": "8bit",
        "optimizer_offload": False,
        "memory_offload": "auto",
        "steps": 2,
    }
    text = long_rows_table([whole | {"predicted_memory_gib": 9.0}])
    assert "| none, 8bit | 2.0 | 50.0% | 9.0 | 9.0 |\n" in text
    assert "does not hold" not in text and "default" not in text


def test_kernels_of_several_runs_share_a_table():
    run = {"model": "nano", "seq_len": 4096, "device": "a card", "mfu": 0.5, "step_seconds": 0.01}
    norms, products = ({"kind": kind, "seconds": 4e-3, "launches": 1000} for kind in ("norms", "matrix products"))
    longer, updates = products | {"seconds": 9e-3}, {"kind": "optimizer", "seconds": 2e-4, "launches": 7}
    records = [
        run | {"cuda_graph": "auto", "kernel_kinds": [norms, products, updates], "busy_seconds": 8e-3},
        run | {"cuda_graph": None, "kernel_kinds": [longer], "busy_seconds": 0.011},
    ]
    text = kernels_table(records)
    assert "| kind of kernel | `nano`, 4,096, before | `nano`, 4,096 |\n" in text
    assert "| matrix products | 9.0 (1,000) | 4.0 (1,000) |\n| norms | – | 4.0 (1,000) |\n" in text
    assert "| no kernel runs | 0.0 | 2.0 |\n| whole step | 10.0 | 10.0 |\n" in text
    assert "| the optimizer's share | – | 2.0% |\n| MFU | 50.0% | 50.0% |\n" in text
    assert "(a card)" in text and "without CUDA graphs" in text
    assert "before" not in kernels_table(records[:1])


@pytest.mark.parametrize("number", [0, 1])
def test_the_published_long_rows_had_all_inputs_on_the_gpu(number):
    """docs/long_rows.md says so, because the record does not."""
    record = json.loads((ROOT / "docs" / "results" / "long_rows.json").read_text(encoding="utf-8"))["records"][number]
    if "memory_offload" in record:
        pytest.skip("the record says it itself")
    config = shape_of(record["model"])
    assert config.num_parameters == record["parameters"]
    step = Step(
        config, record["seq_len"], precision=record["precision"], memory=record["memory"], family=HOPPER.name,
        offload_optimizer=record["optimizer_offload"], whole_rows=True,
    )  # fmt: skip
    peak = predict(step).peak_bytes / 2**30
    assert peak == pytest.approx(record["peak_memory_gib"], rel=0.002)
    text = (ROOT / "docs" / "long_rows.md").read_text(encoding="utf-8")
    assert f"{peak:.1f} GiB" in text


def test_a_difference_that_rounds_to_zero_has_no_sign():
    start = {"model": "125m", "precision": "bf16-mixed", "steps": 3, "val_loss": 2.0, "device": "a card"}
    fp32 = {**start, "model": "pretrained", "val_loss": 1.5, "master": None, "tokens_per_second": 1000.0}
    exact = {**fp32, "precision": "bf16-true", "master": "exact", "val_loss": 1.49999, "peak_memory_gib": 4.0}
    text = updates_table([start, fp32, exact])
    assert "| `bf16-true` | `exact` | 1.5000 | 0.00% | 100% | 1,000 | 4.00 |\n" in text
    assert "| `bf16-mixed` | fp32 weights | 1.5000 | 0.00% | 100% | 1,000 | – |\n" in text


def test_fp8_is_compared_with_bf16():
    shared = {"model": "8b", "seq_len": 8192, "steps": 200, "device": "a card", "mfu": 0.5}
    losses = [dict(zip(("train_loss_mean", "train_loss_last_10", "val_loss"), three, strict=True)) for three in (
        (3.0, 2.0, 4.0), (2.97, 2.01, 4.04),
    )]  # fmt: skip
    fp8 = shared | losses[1] | {"precision": "fp8", "recipe": "rowwise", "tokens_per_second": 1250.0}
    bf16 = shared | losses[0] | {"precision": "bf16-true", "recipe": "tensorwise", "tokens_per_second": 1000.0}
    fp8["attention"] = bf16["attention"] = "flash"
    chance = bf16 | {"attention": "sdpa", "tokens_per_second": 900.0, "val_loss": 4.004}
    assert fp8_table([fp8, chance, bf16]).splitlines()[-3:] == [
        "| `bf16-true` | 1,000 | 1.00 | 50.0% | 3.0000 (0.00%) | 2.0000 (0.00%) | 4.0000 (0.00%) |",
        "| `bf16-true`, `attention=sdpa` | 900 | 0.90 | 50.0% | 3.0000 (0.00%) | 2.0000 (0.00%) | 4.0040 (+0.10%) |",
        "| `fp8`, `rowwise` | 1,250 | 1.25 | 50.0% | 2.9700 (-1.00%) | 2.0100 (+0.50%) | 4.0400 (+1.00%) |",
    ]
