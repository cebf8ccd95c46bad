"""The dropout map: published vectors, stored masks, its definition, and its statistics."""

import pytest
import torch

from flash_train.attention import AttentionSpec, Causal, RngState, attention, keep_mask
from flash_train.attention.dropout import draw_state, philox, stream_key

STATE = RngState(0x0123456789ABCDEF, 42).as_tensor(torch.device("cpu"))


def words(*values):
    return tuple(torch.tensor(v, dtype=torch.int64) for v in values)


def test_philox_known_answers():
    """Random123's published vectors of philox4x32 with 7 and 10 rounds."""
    ones = 0xFFFFFFFF
    zeros7 = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    ones7 = (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)
    zeros10 = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox(words(0, 0, 0, 0), words(0, 0)) == words(*zeros7)
    assert philox(words(ones, ones, ones, ones), words(ones, ones)) == words(*ones7)
    assert philox(words(0, 0, 0, 0), words(0, 0), rounds=10) == words(*zeros10)


def test_stored_masks():
    """These masks must never change: a seed gives the same run in every version."""
    rows = keep_mask(STATE, 3, 5, torch.arange(30, 34), torch.arange(14, 34), 128)
    assert ["".join("x" if keep else "." for keep in row) for row in rows.tolist()] == VECTORS


def test_sixteen_elements_share_a_call():
    """Rows and columns {0, 1, 8, 9} are the sixteen bytes of the call with counter (0, 0, head, entry)."""
    call = philox(words(0, 0, 5, 3), stream_key(STATE))
    expected = [(int(word) >> 8 * byte) & 0xFF for word in call for byte in range(4)]
    corner = torch.tensor([0, 1, 8, 9])
    thresholds = torch.stack([keep_mask(STATE, 3, 5, corner, corner, k) for k in range(257)])
    value = 256 - thresholds.sum(0)  # an element is kept if the threshold is above its byte
    for i, q in enumerate(corner.tolist()):
        for j, k in enumerate(corner.tolist()):
            word, byte = 2 * (q % 2) + k % 2, 2 * (q // 8) + k // 8
            assert value[i, j] == expected[4 * word + byte]


def test_mask_depends_on_positions_not_on_tiles():
    whole = keep_mask(STATE, 0, 0, torch.arange(96), torch.arange(96), 200)
    part = keep_mask(STATE, 0, 0, torch.arange(37, 61), torch.arange(11, 90), 200)
    assert torch.equal(whole[37:61, 11:90], part)


@pytest.mark.parametrize("change", ["seed", "offset", "entry", "head"])
def test_mask_depends_on_every_coordinate(change):
    base = {"seed": 1, "offset": 2, "entry": 3, "head": 4}

    def mask(seed, offset, entry, head):
        state = RngState(seed, offset).as_tensor(torch.device("cpu"))
        return keep_mask(state, entry, head, torch.arange(256), torch.arange(256), 128)

    agree = (mask(**base) == mask(**(base | {change: base[change] + 1}))).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / 256  # independent fair bits: standard deviation 0.5 / 256


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_a_multiple_of_1_256(p):
    threshold = AttentionSpec(dropout=p).keep_threshold
    assert threshold == round(256 * (1 - p))
    kept = keep_mask(STATE, 0, 0, torch.arange(1024), torch.arange(1024), threshold).double().mean().item()
    rate = threshold / 256
    assert abs(kept - rate) < 5 * (rate * (1 - rate)) ** 0.5 / 1024


def test_the_output_is_unbiased():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, 1, 8, dtype=torch.float64) for _ in range(3))
    plain = attention(q, k, v, AttentionSpec(Causal()), backend="reference")
    spec = AttentionSpec(Causal(), dropout=0.3)
    draws = torch.stack([attention(q, k, v, spec, rng=RngState(s), backend="reference") for s in range(400)])
    z = (draws.mean(0) - plain) / (draws.std(0) / 400**0.5).clamp_min(1e-12)
    assert z.square().mean().sqrt() < 1.3
    assert z.abs().max() < 5


def test_state_follows_the_generator():
    torch.manual_seed(3)
    first, second = draw_state(torch.device("cpu")), draw_state(torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(first, draw_state(torch.device("cpu")))
    assert not torch.equal(first, second)


def test_64_bit_seeds():
    state = RngState(2**64 - 1, torch.tensor(-1)).as_tensor(torch.device("cpu"))
    assert state.tolist() == [-1, -1]


VECTORS = [
    "x......x..x..x.xxx..",
    "xxx.x.x....xx.xx...x",
    "..x...x..x..x......x",
    "xx..x..x......x.....",
]
