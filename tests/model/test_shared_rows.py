"""The model on rows that several ranks share; steps of several ranks are in tests/distributed."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from flash_train.attention.parallel import SharedRow, plan_row
from tests.support.model.tiny import tiny_model

ROWS = [(20, 44), (64,), (10, 10, 44)]


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def losses(group, compiler=None) -> list[float]:
    model = tiny_model(attention="chunked", attention_dropout=0.1, memory="selective").train()
    for block in model.blocks if compiler else ():
        block.compile(dynamic=False, backend=compiler)
    tokens, positions, found = torch.arange(64)[None], torch.arange(64)[None], []
    for lengths in ROWS:
        row = SharedRow(plan_row(lengths, 64, 1), group, torch.device("cpu"))
        torch.manual_seed(3)
        loss, _ = model.loss(tokens, tokens, positions=positions, packing=row)
        loss.backward()
        found.append(loss.item())
    return found


def test_compiled_blocks_accept_every_row_without_recompiling(alone):
    torch.compiler.reset()
    compiler = CompileCounterWithBackend("eager")
    assert losses(alone, compiler) == losses(alone)
    assert compiler.frame_count == 2 * 2  # each of two blocks before and after its attention


def test_positions_of_a_part_of_a_row_must_be_given(alone):
    row = SharedRow(plan_row((64,), 64, 1), alone, torch.device("cpu"))
    with pytest.raises(ValueError, match="positions=None: a rank that has a part of a row must give its tokens' pos"):
        tiny_model()(torch.zeros((1, 64), dtype=torch.int64), packing=row)
