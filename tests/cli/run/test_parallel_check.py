"""`parallel.check=true`: which step is compared, and what a run prints."""

from dataclasses import replace

import pytest
import torch

from flash_train.attention.parallel import plan_row
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.run.parallel_check import USABLE, CheckSize, largest_size, shorten, sizes
from flash_train.data.dataset import as_row, collate
from flash_train.model import ModelConfig
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from tests.support.processes import run_ranks

MODEL = ModelConfig(vocab_size=256, n_layers=8, width=64, n_heads=4, n_kv_heads=2, head_dim=16, mlp_width=128)


def test_rows_get_shorter_before_layers_are_left_out():
    found = list(sizes(Step(MODEL, 16_384), context=2))
    assert found == [
        *(CheckSize(seq_len, 8) for seq_len in (16_384, 8192, 4096)),
        *(CheckSize(4096, layers) for layers in (4, 2, 1)),
    ]
    assert list(sizes(Step(MODEL, 1024), context=2))[1] == CheckSize(1024, 4)


def test_the_largest_step_that_fits_is_taken(tiny):
    step = Step(MODEL, 16_384, fused=False, attention="chunked", memory="checkpoint")
    plan = parallel_plan(compose_config([*tiny, "trainer.devices=2", "parallel=context"]))
    assert largest_size(step, plan, None) == CheckSize(16_384, 8)
    needed = predict(replace(step, seq_len=8192, accumulate=2, precision="fp32")).peak_bytes
    assert largest_size(step, plan, int(needed / USABLE) + 1) == CheckSize(8192, 8)
    assert largest_size(step, plan, 1) == CheckSize(4096, 1)


def test_a_shorter_row_still_crosses_the_boundary_of_every_rank():
    def row(seed):
        tokens = torch.randint(0, 256, (512,), generator=torch.Generator().manual_seed(seed))
        return {**as_row(tokens.numpy(), tokens.numpy(), [32] * 16, capacity=20), "place": seed}

    batch = collate([row(3), row(4)])
    short = shorten(batch, 256)
    assert short["tokens"].shape == (2, 256) and torch.equal(short["tokens"], batch["tokens"][:, :256])
    assert short["lengths"] == (128, 32, 32, 32, 32) * 2 and short["places"] == (3, 4)
    plan = plan_row(short["lengths"], 512, 4)
    split = {p.document for p in plan.pieces[0]} & {p.document for p in plan.pieces[3]}
    assert split  # a document that the first and the last rank share


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("parallel=context", "attention.dropout=0.2", "model.residual_dropout=0.1"), ", the same dropout masks"),
        (("parallel=fsdp", "precision=bf16-true"), "of one device's own ("),
    ],
)
def test_a_run_checks_a_step_and_then_trains(tiny, tmp_path, options, says):
    given = ("batch_size=1", "parallel.check=true", "callbacks.sample.tokens=0", "trainer.progress_bar=false")
    out = run_ranks("flash_train.cli.train", 2, *tiny, *given, *options)
    (line,) = [line for line in out.splitlines() if line.startswith("parallel.check: ")]
    assert line.startswith("parallel.check: a step of 2 devices and of one, rows of 64 tokens, all layers: loss ")
    assert says in line
    error = float(line.split("largest error ")[1].split()[0])
    assert error <= 3
    assert (tmp_path / "run" / "metrics.csv").is_file()
    assert "parallel" in (tmp_path / "run" / "config.yaml").read_text()
