"""Random rows of documents for `plan_row`."""

import math
import random

import numpy as np

DRAWS = range(1000)
UNUSUAL = range(1000, 1400)


def draw(seed):
    """Return random arguments of ``plan_row``: few or many documents, with and without padding."""
    if seed in UNUSUAL:
        return draw_unusual(seed)
    pick = random.Random(seed)
    ranks = pick.randint(1, 8)
    seq_len = ranks * pick.choice((1, 5, 16, 40, 96, 200))
    sizes = pick.choice(((1, 3, 7), (1, 17, 33, 64), (16, 32, 160), (7, 150, 700), (seq_len,)))
    lengths = [min(pick.choice(sizes), seq_len)]
    while sum(lengths) < seq_len and pick.random() > 0.04:
        lengths.append(min(pick.choice(sizes), seq_len - sum(lengths)))
    return lengths, seq_len, ranks, pick.choice((None, None, 0, 5, 40, 300))


def draw_unusual(seed):
    """Return random arguments of ``plan_row`` whose ranks are hard to align: short documents, or equal remainders."""
    pick = random.Random(seed)
    ranks = pick.choice((2, 3, 4, 8))
    seq_len = ranks * pick.choice((5, 16, 23, 40, 64, 100, 128))
    sizes = pick.choice(((1,), (seq_len,), (15, 31, 63), (15,), range(1, 16), (17, 33), (8, 24, 56)))
    end = seq_len - pick.choice((0, 0, 1, 7, 15 * ranks)) if seq_len > 16 * ranks else seq_len
    lengths = []
    while sum(lengths) < end:
        lengths.append(min(pick.choice(sizes), end - sum(lengths)))
    return lengths, seq_len, ranks, pick.choice((None, None, 0, 5, 40, 300))


def heavy_tailed(seed, seq_len=131072):
    """Return log-normal document lengths that fill a row; the last document is cut at the end of the row."""
    numbers = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < seq_len:
        length = round(math.exp(7.3 + 1.3 * numbers.standard_normal()))
        lengths.append(min(max(64, min(32768, length)), seq_len - sum(lengths)))
    return lengths
