"""Cases of the contract for Hopper's kernels: several tiles, each width of the tiles, and more heads than a wave."""

import torch

from flash_train.attention.masks import Full, Window
from tests.support.attention.cases.problem import Case
from tests.support.attention.cases.recipes import Blocks, Documents


def same_lengths(*lengths):
    return tuple((n, n) for n in lengths)


#: lists of blocks of 128 queries, by tiles of 192 (a random draw)
LISTED = Case(
    "blocks-long", ((221, 329),), heads=3, kv_heads=3, head_dim=40, v_head_dim=64, band=Full(),
    terms=(Blocks((128, 128), 0.9, per_head=True, shape=(3, 3)),), sinks=True, learns=False, packed=True, tail=(3, 7),
    strided="wide", dout="row", dtype=torch.float16, seed=810525970,
)  # fmt: skip
#: several tiles, at each width of a tile
WIDE = [
    Case("causal-64", same_lengths(333, 70), head_dim=64, heads=4, kv_heads=2),
    Case("full-64", ((200, 333),), head_dim=56, band=Full()),
    Case("window-dropout-64", ((333, 200),), head_dim=64, band=Window(90, 20), dropout=0.2, sinks=True),
    Case("packed-64", ((5, 5), (0, 9), (300, 300), (140, 270)), head_dim=64, packed=True, tail=(20, 7), dropout=0.1),
    Case("causal-128", same_lengths(333), head_dim=128, heads=4, kv_heads=1),
    Case("full-dropout-128", ((200, 290),), head_dim=72, v_head_dim=128, band=Full(), dropout=0.5),
    # row maxima that grow past the forward's rescaling threshold, in some rows only
    Case("large-scores-128", same_lengths(520), head_dim=128, spread=2.5),
    Case("large-scores-dropout-256", ((260, 390),), head_dim=256, band=Full(), spread=2.0, dropout=0.1, sinks=True),
    Case("softcap-128", same_lengths(290), head_dim=128, softcap=3.0, terms=(Documents(90),)),
    Case("packed-128", ((130, 130), (0, 0), (257, 140)), head_dim=128, packed=True, tail=(9, 9), strided="wide"),
    Case(
        "blocks-128",
        same_lengths(400),
        head_dim=128,
        heads=3,
        kv_heads=3,
        terms=(Blocks((128, 128), 0.6, per_head=True),),
        band=Full(),
    ),
    Case("blocks-of-256-64", same_lengths(600), head_dim=64, heads=4, terms=(Blocks((256, 128), 0.5),)),
    Case("documents-64", same_lengths(600), head_dim=64, band=Full(), terms=(Documents(200),)),
    Case("causal-256", same_lengths(150), head_dim=256, dropout=0.1),
    Case("documents-256", same_lengths(600), head_dim=256, heads=1, kv_heads=1, terms=(Documents(400),)),
    Case("softcap-256", ((90, 150),), head_dim=200, heads=4, kv_heads=2, band=Full(), softcap=3.0, slopes="heads"),
    Case("packed-256", ((70, 130), (0, 0), (129, 129)), head_dim=256, packed=True, tail=(9, 9), strided="wide"),
]
#: enough heads that the programs of one head clear and convert the dQ accumulators of others
MANY_HEADS = [
    Case("more-queries", ((400, 130),), heads=12, kv_heads=6, head_dim=64, band=Full()),
    Case("more-keys", ((130, 300), (90, 200)), heads=6, kv_heads=3, head_dim=128),
    Case("packed", ((130, 260), (140, 0), (200, 90)), heads=6, kv_heads=6, head_dim=64, packed=True, tail=(150, 7)),
]
