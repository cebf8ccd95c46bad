"""Patterns of blocks: small patterns drawn, and properties of all patterns."""

import pytest
import torch

from flash_train.attention.masks import BlockSparse, Causal
from flash_train.attention.packing import Entry
from flash_train.attention.patterns import butterfly, local_global, random, strided


def drawn(pattern):
    assert pattern.dtype == torch.bool
    return ["".join("x" if block else "." for block in row) for row in pattern.tolist()]


def test_small_local_global_patterns():
    assert drawn(local_global(6, 6, window=1, n_global=1)) == [
        "xxxxxx",
        "xxx...",
        "xxxx..",
        "x.xxx.",
        "x..xxx",
        "x...xx",
    ]
    assert drawn(local_global(2, 5, window=0, n_global=0)) == ["...x.", "....x"]  # aligned at the ends
    assert drawn(local_global(4, 2, window=0, n_global=1)) == ["xx", "x.", "x.", "xx"]


def test_small_strided_patterns():
    assert drawn(strided(6, 6, stride=3, window=1)) == [
        "xx.x..",
        "xxx.x.",
        ".xxx.x",
        "x.xxx.",
        ".x.xxx",
        "..x.xx",
    ]
    assert drawn(strided(1, 7, stride=3, window=0)) == ["x..x..x"]
    assert strided(5, 9, stride=1, window=0).all()


def test_small_butterfly_patterns():
    assert drawn(butterfly(8, 8)) == [
        "xxx.x...",
        "xx.x.x..",
        "x.xx..x.",
        ".xxx...x",
        "x...xxx.",
        ".x..xx.x",
        "..x.x.xx",
        "...x.xxx",
    ]


@pytest.mark.parametrize("n", [1, 2, 4, 32])
def test_butterfly_rows_have_one_block_per_bit(n):
    pattern = butterfly(n, n)
    assert (pattern.sum(0) == n.bit_length()).all()
    assert (pattern.sum(1) == n.bit_length()).all()
    mixed = torch.eye(n)
    for _ in range(n.bit_length() - 1):  # every block reaches every other one within as many steps as there are bits
        mixed = mixed @ pattern.float()
    assert (mixed > 0).all()


def test_butterfly_of_any_size_is_the_end_of_a_larger_one():
    assert torch.equal(butterfly(5, 7), butterfly(8, 8)[3:, 1:])
    assert torch.equal(butterfly(8, 3), butterfly(8, 8)[:, 5:])


def test_random_rows_are_equally_dense():
    one, same, other = (random(40, 16, 4, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert (one.sum(1) == 4).all()
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.any(0).all()
    torch.manual_seed(0)
    assert torch.equal(random(40, 16, 4), one)
    assert not random(3, 5, 0).any()
    assert random(3, 5, 5).all()


BUILDERS = {
    "local_global": lambda **sizes: local_global(**sizes, window=1, n_global=1),
    "strided": lambda **sizes: strided(**sizes, stride=2, window=0),
    "butterfly": butterfly,
    "random": lambda **sizes: random(**sizes, per_row=1),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_serves_a_mask(name):
    pattern = BUILDERS[name](n_q=3, n_k=4, device="cpu")
    assert pattern.shape == (3, 4)
    mask = Causal() & BlockSparse(pattern, 16)
    mask.validate(1, 48, 64, 1, torch.device("cpu"), packed=False)
    dense = mask.dense(Entry.of_lengths(48, 64))[0]
    blocks = dense.view(3, 16, 4, 16).any(3).any(1)
    assert torch.equal(blocks, pattern & Causal().dense(Entry.of_lengths(3, 4))[0])


@pytest.mark.parametrize("name", BUILDERS)
def test_patterns_are_made_on_the_requested_device(name):
    assert BUILDERS[name](n_q=3, n_k=4, device="meta").device.type == "meta"


BAD = [
    (lambda: local_global(0, 4, 1, 1), "n_q=0: must be an integer of at least 1"),
    (lambda: local_global(4, 4, -1, 1), "window=-1: must be an integer of at least 0"),
    (lambda: local_global(4, 4, 1, 1.5), "n_global=1.5: must be an integer of at least 0"),
    (lambda: strided(4, 4, 0, 1), "stride=0: must be an integer of at least 1"),
    (lambda: butterfly(4, 0), "n_k=0: must be an integer of at least 1"),
    (lambda: random(4, 4, 5), r"per_row=5: must be in \[0, 4\]"),
    (lambda: random(4, 4, -1), "per_row=-1: must be an integer of at least 0"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
