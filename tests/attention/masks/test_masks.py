"""All answers of a mask agree with its dense form: random terms, alone and composed."""

import functools
import operator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from flash_train.attention.masks import (
    PARTIAL,
    SKIPPED,
    WHOLE,
    And,
    BlockSparse,
    Causal,
    Document,
    Full,
    MaskFunction,
    Tree,
    Window,
    device_term,
)
from flash_train.attention.packing import Entry

HEADS = 2
CPU = torch.device("cpu")
LENGTHS = st.integers(0, 80)
SIDES = st.none() | st.integers(0, 90)


def seeded(build):
    """A hypothesis strategy from a function of a generator."""
    return st.integers(0, 2**32 - 1).map(lambda seed: build(torch.Generator().manual_seed(seed)))


def random_parents(n, generator):
    """A random forest, in which parents come before or after their children."""
    rank = torch.randperm(n, generator=generator).tolist()  # the parent is any node of smaller rank, or none
    draw = torch.randint(2**31, (n,), generator=generator).tolist()
    below = {r: [i for i in range(n) if rank[i] < r] for r in range(n)}
    return [below[rank[i]][draw[i] % rank[i]] if rank[i] and draw[i] % 7 else -1 for i in range(n)]


def block_masks(sizes=None):
    def build(args):
        shape, sizes, share, seed = args
        pattern = torch.rand(*shape, 81, 81, generator=torch.Generator().manual_seed(seed)) < share
        return BlockSparse(pattern[..., : -(-80 // sizes[0]), : -(-80 // sizes[1])], sizes)

    sizes = st.tuples(st.integers(1, 40), st.integers(1, 40)) if sizes is None else st.just(sizes)
    shapes = st.sampled_from([(), (HEADS,)])
    return st.tuples(shapes, sizes, st.sampled_from([0.1, 0.5, 0.95]), st.integers(0, 2**32 - 1)).map(build)


BANDS = st.just(Full()) | st.just(Causal()) | st.builds(Window, SIDES, SIDES)
DOCUMENTS = seeded(
    lambda g: Document(*(torch.randint(4, (2, 80), generator=g).sort(-1)[0].int() for _ in "qk"))
) | seeded(lambda g: Document(torch.randint(3, (80,), generator=g).int()))
TREES = st.builds(
    lambda n, seed: Tree([random_parents(n, torch.Generator().manual_seed(seed + row)) for row in range(2)]),
    st.integers(1, 80),
    st.integers(0, 2**31),
)
FUNCTION = MaskFunction(None, lambda entry, head, q, k, period: (3 * q + 5 * k + head + entry.index) % period != 0,
                        (torch.tensor(4),))  # fmt: skip
TERMS = BANDS | block_masks() | block_masks((16, 16)) | DOCUMENTS | TREES | st.just(FUNCTION)
COMPOSED = st.lists(TERMS, min_size=1, max_size=3).map(lambda terms: functools.reduce(operator.and_, terms))


def terms_of(mask):
    return mask.terms if isinstance(mask, And) else (mask,)


def shaped(mask, len_q, len_k):
    """The mask with document ids cut to the lengths of the call."""
    kept = [
        Document(term.q_ids[..., :len_q], (term.q_ids if term.k_ids is None else term.k_ids)[..., :len_k])
        if isinstance(term, Document)
        else term
        for term in terms_of(mask)
    ]
    return functools.reduce(operator.and_, kept)


def blocks_of(dense, block_q, block_k):
    """For each block: does any pair attend, and does every pair attend? Computed by loops."""
    rows = [range(i, min(i + block_q, dense.shape[1])) for i in range(0, dense.shape[1], block_q)]
    columns = [range(j, min(j + block_k, dense.shape[2])) for j in range(0, dense.shape[2], block_k)]
    cut = [[[head[r.start : r.stop, c.start : c.stop] for c in columns] for r in rows] for head in dense]
    shape = (dense.shape[0], len(rows), len(columns))
    return (
        torch.tensor([[[bool(block.any()) for block in row] for row in head] for head in cut]).view(shape),
        torch.tensor([[[bool(block.all()) for block in row] for row in head] for head in cut]).view(shape),
    )


@given(COMPOSED, LENGTHS, LENGTHS, st.integers(1, 50), st.integers(1, 50), st.integers(0, 1))
@example(Window(3, 2) & Tree([[-1, 0, 0], [-1, 0, 1]]), 80, 80, 16, 32, 1)
@example(Causal() & FUNCTION, 0, 5, 16, 16, 0)
@settings(max_examples=500, deadline=None)
def test_all_answers_agree_with_the_dense_mask(mask, len_q, len_k, block_q, block_k, batch):
    mask = shaped(mask, len_q, len_k)
    entry = Entry(batch, batch, 0, 0, len_q, len_k)
    mask.validate(2, len_q, len_k, HEADS, CPU, packed=False)
    dense = mask.dense(entry, HEADS)
    assert dense.dtype == torch.bool
    assert dense.shape[0] in (1, HEADS)
    assert dense.shape[1:] == (len_q, len_k)
    dense = dense.expand(HEADS, -1, -1)
    assert mask.pairs(entry, HEADS) == int(dense.sum())

    any_pair, every_pair = blocks_of(dense, block_q, block_k)
    states = mask.blocks(entry, block_q, block_k, HEADS).expand(HEADS, -1, -1)
    assert states.shape == any_pair.shape
    assert states.dtype == torch.int8
    assert not any_pair[states == SKIPPED].any()
    assert every_pair[states == WHOLE].all()
    assert ((states == SKIPPED) | (states == PARTIAL) | (states == WHOLE)).all()

    left, right, names, tensors, tail = mask.lower()
    band = Window(None if left < 0 else left, None if right < 0 else right)
    within = band.dense(entry)
    assert (within | ~dense).all()
    if not names and not any(isinstance(term, BlockSparse) for term in terms_of(mask)):
        assert torch.equal(within.expand_as(dense), dense)
    if tail >= 0:  # before the tail, the element-wise terms restrict nothing
        free = functools.reduce(operator.and_, (t for t in terms_of(mask) if isinstance(t, BlockSparse)), band)
        before = max(len_k - tail, 0)
        assert torch.equal(dense[:, :, :before], free.dense(entry, HEADS).expand_as(dense)[:, :, :before])
    remaining = iter(tensors)
    for name in names.split(","):
        if name:
            device_term(name, remaining)
    assert not list(remaining)


@given(COMPOSED, LENGTHS, LENGTHS, st.booleans(), st.integers(0, 1))
@settings(max_examples=400, deadline=None)
def test_block_maps_skip_no_pair_that_attends(mask, len_q, len_k, packed, batch):
    mask = shaped(mask, len_q, len_k)
    if len({term.block_sizes for term in terms_of(mask) if term.block_sizes is not None}) > 1:
        with pytest.raises(ValueError, match="BlockSparse terms have blocks of .*: must be equal to be composed"):
            mask.block_map(len_q, len_k, packed)
        return
    found = mask.block_map(len_q, len_k, packed)
    if found is None:
        assert not any(isinstance(term, BlockSparse) for term in terms_of(mask))
        return
    entry = Entry(batch, batch, 0, 0, len_q, len_k)
    any_pair, _ = blocks_of(mask.dense(entry, HEADS).expand(HEADS, -1, -1), found.block_q, found.block_k)
    own = found.states[batch if found.states.shape[0] > 1 else 0].expand(HEADS, -1, -1)
    rows, columns = any_pair.shape[1:]
    assert own.shape[1] >= rows
    assert own.shape[2] >= columns
    own = own[:, :rows, :columns]
    assert not any_pair[own == SKIPPED].any()
    band = Window(*(None if bound < 0 else bound for bound in mask.lower()[:2])).dense(entry)
    _, every_pair = blocks_of((mask.dense(entry, HEADS) | ~band).expand(HEADS, -1, -1), found.block_q, found.block_k)
    assert every_pair[own == WHOLE].all()
    if all(isinstance(term, BlockSparse) for term in terms_of(mask)):  # the map is then exact
        assert torch.equal(own == WHOLE, any_pair)


@given(COMPOSED, st.integers(1, 80), st.integers(1, 80), st.integers(0, 1), st.data())
@settings(max_examples=200, deadline=None)
def test_parts_of_a_dense_mask_equal_slices_of_it(mask, len_q, len_k, batch, data):
    mask = shaped(mask, len_q, len_k)
    entry = Entry(batch, batch, 0, 0, len_q, len_k)
    a, b = (sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in (len_q, len_k))
    piece = mask.dense(entry, HEADS, queries=range(*a), keys=range(*b))
    assert torch.equal(piece, mask.dense(entry, HEADS)[:, a[0] : a[1], b[0] : b[1]])
    if not mask.per_entry:
        other = Entry(1 - batch, 1 - batch, 0, 0, len_q, len_k)
        assert torch.equal(mask.dense(other, HEADS), mask.dense(entry, HEADS))


@given(st.lists(TERMS, min_size=1, max_size=4), LENGTHS, LENGTHS)
@settings(max_examples=200, deadline=None)
def test_composition_is_a_conjunction(terms, len_q, len_k):
    terms = [shaped(term, len_q, len_k) for term in terms]
    entry = Entry(1, 1, 0, 0, len_q, len_k)
    dense = [term.dense(entry, HEADS).expand(HEADS, -1, -1) for term in terms]
    composed = functools.reduce(operator.and_, terms)
    expected = functools.reduce(operator.and_, dense)
    assert torch.equal(composed.dense(entry, HEADS).expand_as(expected), expected)


def test_composed_terms_have_one_block_map():
    """A block is visited only if all terms visit it; the map covers the blocks that all terms know."""
    torch.manual_seed(0)
    patterns = torch.rand(HEADS, 5, 4) < 0.5, torch.rand(4, 6) < 0.5
    ids = torch.stack([torch.arange(64) // 20, torch.arange(64) // 50]).int()
    mask = functools.reduce(operator.and_, [*(BlockSparse(pattern, 16) for pattern in patterns), Document(ids)])
    found = mask.block_map(64, 64, packed=False)
    documents = Document(ids).block_map(64, 64, packed=False, block=(16, 16)).states
    assert found[1:] == (16, 16)
    assert torch.equal(found.states, documents * (patterns[0][None, :, :4, :4] & patterns[1][:4, :4]))
    assert documents.tolist() == [
        [[[2, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]],
        [[[2, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 1], [1, 1, 1, 1]]],
    ]
    assert mask.block_map(64, 64, packed=True).states.shape == (1, HEADS, 4, 4)
    assert mask.block_map(64, 64, packed=True).states.max() == PARTIAL  # packed, the document has no map


def test_composed_bands_are_one_band():
    assert Causal() & Window(7) == Window(7, 0)
    assert Window(7, 3) & Window(5, 9) & Full() == Window(5, 3)
    assert Causal() & Full() == Causal() & Causal() == Causal()
    assert Full() & Full() == Full()
    assert isinstance(Window() & Causal(), Causal)
    documents = Document(torch.zeros(4, dtype=torch.int32))
    assert Full() & documents is documents
    with pytest.raises(TypeError, match="unsupported operand"):
        Causal() & True


@given(st.integers(1, 70), st.integers(0, 2**31), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_nodes_attend_to_their_ancestors(n, seed, prefix):
    parents = random_parents(n, torch.Generator().manual_seed(seed))
    dense = Tree(parents).dense(Entry.of_lengths(n, n + prefix))[0]
    for node in range(n):
        seen, at = set(range(prefix)), node
        while at >= 0:
            seen.add(prefix + at)
            at = parents[at]
        assert set(dense[node].nonzero().flatten().tolist()) == seen
    assert torch.equal(Tree(torch.tensor(parents)).bits, Tree([parents]).bits)
