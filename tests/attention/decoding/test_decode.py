"""The decode kernel compared with the reference, in the interpreter and on a GPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_train.attention import AttentionSpec, cached_attention
from tests.support.attention.decoding import CASES, error
from tests.support.tiers import slow_after

pytest.importorskip("triton", reason="Triton exists for Linux only")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(request):
    """The error of each case that this session tests, from one process."""
    prefix = f"{test_decode_kernel_equals_the_reference_in_the_interpreter.__name__}["
    names = [item.name[len(prefix) : -1] for item in request.session.items if item.name.startswith(prefix)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.attention.decoding", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {row["case"]: row["result"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", slow_after(4, [case.name for case in CASES]))
def test_decode_kernel_equals_the_reference_in_the_interpreter(results, name):
    result = results[name]
    assert not isinstance(result, str), result
    assert result <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_kernel_equals_the_reference_on_a_gpu(case, dtype):
    assert error(replace(case, dtype=dtype, head_dim=128), "cuda") <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch, len_q", [(70_000, 1), (1, 131_072)])
def test_more_programs_than_the_second_grid_axis_allows(batch, len_q):
    """The limit is 65,535; the last sequences, or queries, give the same result as alone."""
    q = torch.randn(batch, len_q, 8, 16, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(batch, 40, 2, 16, device="cuda", dtype=torch.float16) for _ in "kv")
    lengths = torch.full((batch,), 37, dtype=torch.int32, device="cuda")
    whole, _ = cached_attention(q, k, v, lengths, AttentionSpec(), num_splits=2)
    last = [x[-9:] for x in (q[:, -9:], k, v, lengths)]
    alone, _ = cached_attention(*last, AttentionSpec(), num_splits=2)
    assert alone.abs().max() > 0
    assert (whole[-9:, -9:].float() - alone.float()).abs().max() < 2**-10 * alone.abs().max()


@pytest.mark.gpu
def test_long_cache_in_a_cuda_graph():
    """131,072 keys, 32 heads with 8 key heads: equal to attention in fp32, also when replayed after the cache grew."""
    n = 131_072
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, n, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.tensor([n - 5], dtype=torch.int32, device="cuda")

    def exact(length):
        heads = [x[:, :length].float().repeat_interleave(4, 2).transpose(1, 2) for x in (k, v)]
        return torch.nn.functional.scaled_dot_product_attention(q.float().transpose(1, 2), *heads).transpose(1, 2)

    cached_attention(q, k, v, lengths, AttentionSpec())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = cached_attention(q, k, v, lengths, AttentionSpec())
    for length in (n - 5, n):
        lengths.fill_(length)
        graph.replay()
        assert (out.float() - exact(length)).abs().max() < 2**-9 * exact(length).abs().max() + 2**-12
