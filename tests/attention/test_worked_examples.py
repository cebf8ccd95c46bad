"""Examples worked out by hand in texts on FlashAttention, compared with every backend.

Figures are as printed there and are exact to half a unit of the last digit. Some texts computed with rounded figures,
so that their last digit is wrong; this file then has the right figure, and a comment has the printed one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_train.attention import AttentionSpec, attention, flash_unavailable
from flash_train.attention.masks import BlockSparse, Causal, Full, Tree
from flash_train.attention.merge import merge
from flash_train.attention.packing import Entry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNAVAILABLE = flash_unavailable(DEVICE, torch.float32, 64)
KERNELS = pytest.param("triton", marks=pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)))
WITH_LSE = ["reference", "standard", "chunked", KERNELS]
BACKENDS = [*WITH_LSE, "sdpa"]

# NumPy warns about the interpreter of Triton 3.6
pytestmark = pytest.mark.filterwarnings("error", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.mark.skipif(UNAVAILABLE is None, reason="the kernels run in this process")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_worked_examples_with_the_kernels_in_the_interpreter():
    """Run the examples of this file with the kernels, in a process with the Triton interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "triton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 10, done.stdout


def run(q, k, v, spec, backend, return_lse=False):
    """Call ``attention`` for one head, with (queries, head_dim) and (keys, head_dim) matrices."""
    device = DEVICE if backend == "triton" else torch.device("cpu")
    tensors = [(torch.tensor(x) if isinstance(x, list) else x).to(device) for x in (q, k, v)]
    result = attention(*(x[None, :, None] for x in tensors), spec, backend=backend, return_lse=return_lse)
    return (result[0][0, :, 0].cpu(), result[1][0, 0].cpu()) if return_lse else result[0, :, 0].cpu()


def printed(values, digits):
    """Figures of a text, and their tolerance: half a unit of the last digit."""
    return {"expected": torch.tensor(values), "rtol": 0, "atol": 0.501 * 10.0**-digits}


# One query over two blocks of four keys, without a scale.
EIGHT_Q = [[1.0, 0, 2, 1]]
EIGHT_K = [
    [1.0, 1, 0, 0],
    [0.0, 1, 1, 0],
    [1.0, 0, 1, 1],
    [0.0, 0, 1, 0],
    [2.0, 1, 1, 1],
    [0.0, 1, 0, 1],
    [1.0, 1, 1, 0],
    [0.0, 0, 0, 1],
]
EIGHT_V = [
    [2.0, 1, 0, 3],
    [1.0, 0, 1, 2],
    [0.0, 2, 1, 1],
    [3.0, 1, 0, 0],
    [1.0, 3, 2, 0],
    [0.0, 1, 0, 2],
    [2.0, 0, 1, 1],
    [1.0, 0, 0, 3],
]
EIGHT_SCORES = torch.tensor([1.0, 2, 4, 2, 5, 1, 3, 1])
UNSCALED = AttentionSpec(scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_keys(backend):
    out = run(EIGHT_Q, EIGHT_K, EIGHT_V, UNSCALED, backend)
    torch.testing.assert_close(out[0], **printed([0.920, 2.306, 1.540, 0.452], 3))
    weights = EIGHT_SCORES.exp()
    torch.testing.assert_close(out[0], weights @ torch.tensor(EIGHT_V) / weights.sum())


@pytest.mark.parametrize("backend", WITH_LSE)
def test_eight_keys_block_by_block(backend):
    """Maximum, sum and partial output after each block; the second block rescales the first."""
    halves = [run(EIGHT_Q, EIGHT_K[i : i + 4], EIGHT_V[i : i + 4], UNSCALED, backend, True) for i in (0, 4)]
    sums = [torch.exp(lse - top) for (_, lse), top in zip(halves, (4, 5), strict=True)]
    torch.testing.assert_close(sums[0], **printed([1.320], 3))
    torch.testing.assert_close(sums[1], **printed([1.172], 3))  # the text: 1.171, the sum of rounded terms
    torch.testing.assert_close(halves[0][0][0] * sums[0], **printed([0.641, 2.185, 1.135, 1.420], 3))
    torch.testing.assert_close(halves[1][0][0] * sums[1], **printed([1.289, 3.018, 2.135, 0.227], 3))
    (first, first_lse), (second, second_lse) = ((out[None, :, None], lse[None, None]) for out, lse in halves)
    out, lse = merge(first, first_lse, second, second_lse)
    torch.testing.assert_close(torch.exp(lse - 5).flatten(), **printed([1.658], 3))  # the text: 0.486 + 1.171 = 1.657
    whole, whole_lse = run(EIGHT_Q, EIGHT_K, EIGHT_V, UNSCALED, backend, True)
    torch.testing.assert_close(out[0, :, 0], whole)
    torch.testing.assert_close(lse[0, 0], whole_lse)
    torch.testing.assert_close(whole_lse, EIGHT_SCORES.logsumexp(0, keepdim=True))


# n = 6, d = 2, in tiles of two queries and three keys, causal.
SIX_Q = [[1.0, 0.5], [0.8, -0.1], [0.2, 0.9], [-0.3, 0.4], [0.7, 0.6], [0.1, -0.5]]
SIX_K = [[0.3, 0.7], [0.6, 0.2], [-0.1, 0.8], [0.4, -0.3], [0.9, 0.1], [0.2, 0.5]]
SIX_V = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
SIX_SCORES = [[0.460, 0.495, 0.212], [0.120, 0.325, -0.113]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_six_tokens_in_tiles(backend):
    out = run(SIX_Q, SIX_K, SIX_V, AttentionSpec(Causal()), backend)
    torch.testing.assert_close(out[:2], **printed([[1.0, 0.0], [0.449, 0.551]], 3))
    assert torch.equal(out[0], torch.tensor(SIX_V[0]))  # the first query copies its value
    q, k, v = (torch.tensor(x) for x in (SIX_Q, SIX_K, SIX_V))
    weights = torch.tril(torch.exp(q @ k.T / 2**0.5))
    torch.testing.assert_close(out, weights @ v / weights.sum(1, keepdim=True))


@pytest.mark.parametrize("backend", WITH_LSE)
def test_six_tokens_tile_zero(backend):
    """The scores of the first tile, one key at a time, and its maximum and sum."""
    for key in range(3):
        pattern = torch.zeros(1, 6, dtype=torch.bool)
        pattern[0, key] = True
        _, lse = run(SIX_Q, SIX_K, SIX_V, AttentionSpec(BlockSparse(pattern, (6, 1))), backend, True)
        torch.testing.assert_close(lse[:2], **printed([row[key] for row in SIX_SCORES], 3))
    _, lse = run(SIX_Q, SIX_K, SIX_V, AttentionSpec(Causal()), backend, True)
    torch.testing.assert_close(lse[:1], **printed([0.460], 3))
    torch.testing.assert_close(torch.exp(lse[1:2] - 0.46 / 2**0.5), **printed([1.8146], 4))


# Online softmax over four scores, and attention in one pass over three keys.
@pytest.mark.parametrize("backend", BACKENDS)
def test_online_softmax(backend):
    """With a query of 1 the keys are the scores, and with identity values the output is the weights."""
    scores = [[2.0], [5.0], [1.0], [4.0]]
    out = run([[1.0]], scores, torch.eye(4), UNSCALED, backend)
    torch.testing.assert_close(out[0], **printed([0.0347, 0.6964, 0.0128, 0.2562], 4))
    torch.testing.assert_close(out[0], torch.tensor(scores)[:, 0].softmax(0))


@pytest.mark.parametrize("backend", WITH_LSE)
@pytest.mark.parametrize(
    ("count", "top", "total"), [(1, 2.0, 1.0), (2, 5.0, 1.0498), (3, 5.0, 1.0681), (4, 5.0, 1.4360)]
)
def test_online_softmax_step_by_step(backend, count, top, total):
    scores = [[2.0], [5.0], [1.0], [4.0]]
    _, lse = run([[1.0]], scores[:count], torch.eye(4)[:count], UNSCALED, backend, True)
    torch.testing.assert_close(torch.exp(lse - top), **printed([total], 4))


ONLINE_K = [[0.5, 0.3], [0.8, -0.2], [0.1, 0.7]]
ONLINE_V = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_online_attention(backend):
    out = run([[1.0, 0.0]], ONLINE_K, ONLINE_V, UNSCALED, backend)
    torch.testing.assert_close(out[0], **printed([0.4421, 0.5579], 4))
    weights = run([[1.0, 0.0]], ONLINE_K, torch.eye(3), UNSCALED, backend)
    torch.testing.assert_close(weights[0], **printed([0.3311, 0.4469, 0.2219], 4))  # the text: 0.4470


@pytest.mark.parametrize("backend", WITH_LSE)
@pytest.mark.parametrize(
    ("count", "top", "total", "unnormalised"),
    [(1, 0.5, 1.0, [1.0, 0.0]), (2, 0.8, 1.7408, [0.7408, 1.0]), (3, 0.8, 2.2374, [0.9891, 1.2483])],
)
def test_online_attention_step_by_step(backend, count, top, total, unnormalised):
    out, lse = run([[1.0, 0.0]], ONLINE_K[:count], ONLINE_V[:count], UNSCALED, backend, True)
    torch.testing.assert_close(torch.exp(lse - top), **printed([total], 4))
    torch.testing.assert_close(out[0] * torch.exp(lse - top), **printed(unnormalised, 4))


# Nine candidate tokens of speculative decoding, A to I.
PARENTS = [-1, 0, 1, 1, 2, 2, 3, 3, 4]
SEEN = [
    "100000000",
    "110000000",
    "111000000",
    "110100000",
    "111010000",
    "111001000",
    "110100100",
    "110100010",
    "111010001",
]


@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_of_nine(backend, prefix):
    """With queries of 0 all visible keys have equal weight, so that with identity values the output shows the mask."""
    mask = Tree(PARENTS)
    keys = prefix + 9
    seen = torch.tensor([[True] * prefix + [bit == "1" for bit in row] for row in SEEN])
    assert torch.equal(mask.dense(Entry.of_lengths(9, keys))[0], seen)
    torch.manual_seed(0)
    out = run(torch.zeros(9, 4), torch.randn(keys, 4), torch.eye(keys), AttentionSpec(mask), backend)
    torch.testing.assert_close(out, seen / seen.sum(1, keepdim=True))


@pytest.mark.parametrize("backend", WITH_LSE)
def test_tree_of_nine_counts(backend):
    """The log-sum-exp of equal scores is the logarithm of the number of visible keys: the node and its ancestors."""
    zeros = torch.zeros(9, 4)
    _, lse = run(zeros, zeros, zeros, AttentionSpec(Full() & Tree(PARENTS)), backend, True)
    torch.testing.assert_close(lse.exp(), torch.tensor([1.0, 2, 3, 3, 4, 4, 4, 4, 5]))
