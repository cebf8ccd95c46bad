"""A call's parameters: one list of them, packing and unpacking, and which tensors are copied before a launch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists for Linux only")

import torch

import flash_train
from flash_train.attention import AttentionSpec, BlockSparse, Document, Window
from flash_train.attention.kernels.arguments import addressable
from flash_train.attention.kernels.call import Bounds, Call, call_of

PACKAGE = Path(flash_train.__file__).parent


def lists_of_names(tree: ast.AST) -> Iterator[list[str]]:
    """The names in every list of parameters, of arguments, of elements and of a class's fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            yield [argument.arg for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            yield [name_of(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
        elif isinstance(node, ast.Call):
            yield [*map(name_of, node.args), *(keyword.arg or "" for keyword in node.keywords)]
        elif isinstance(node, (ast.Tuple, ast.List)):
            yield [*map(name_of, node.elts)]


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return getattr(node, "id", getattr(node, "attr", ""))


def longest_run(names: list[str]) -> int:
    """Most parameters of a call that follow each other in a list, as they do in ``Call``."""
    places = [Call._fields.index(name) if name in Call._fields else -2 for name in names]
    longest = run = 0
    for before, place in zip([-2, *places], places, strict=False):
        run = 0 if place < 0 else run + 1 if place == before + 1 and run else 1
        longest = max(longest, run)
    return longest


def test_parameter_list_is_written_out_once():
    found = [
        (str(file.relative_to(PACKAGE)), longest_run(names))
        for file in sorted(PACKAGE.rglob("*.py"))
        for names in lists_of_names(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert len(found) > 1000
    assert [place for place in found if place[1] >= 4] == [("attention/kernels/call.py", len(Call._fields))]


def a_call() -> Call:
    mask = Window(9, 3) & BlockSparse(torch.ones(2, 2, dtype=torch.bool), 32) & Document(torch.zeros(64).int())
    spec = AttentionSpec(mask, scale=2.0, softcap=5.0, dropout=0.5)
    state, slopes = torch.tensor([1, 2]), torch.rand(4)
    return call_of(spec, 16, 64, 64, (None, None), state, (0, 1, 2, 3), slopes, None, packed=False)


def test_call_has_the_fields_of_the_spec():
    call = a_call()
    assert call.bounds == Bounds(left=9, right=3, tail=-1, block_q=32, block_k=32) and call.bounds.block == (32, 32)
    assert (call.terms, call.origin, call.scale, call.softcap, call.keep_threshold) == (
        "document", (0, 1, 2, 3), 2.0, 5.0, 128,
    )  # fmt: skip
    assert call.has_lists and call.has_terms and call.keep_rate == 0.5


def test_packing_and_unpacking_give_the_same_call():
    call = a_call()
    assert Call.of(call.tensors, call.settings) == call._replace(term_tensors=tuple(call.term_tensors))
    again = Call.from_arguments(call.arguments)
    assert all(a is b or a == b for a, b in zip(again, call, strict=True)) and type(again.bounds) is Bounds
    assert not any(isinstance(x, tuple) for x in call.arguments)


def test_strided_tensors_are_copied_except_the_block_map():
    call = a_call()
    assert call.contiguous() is call
    strided = call._replace(alibi_slopes=torch.rand(8)[::2], block_map=call.block_map.expand(2, 4, 2, 2))
    found = strided.contiguous()
    assert found.alibi_slopes.is_contiguous() and torch.equal(found.alibi_slopes, strided.alibi_slopes)
    assert found.block_map is strided.block_map and found.rng is call.rng and found.settings == call.settings


@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 2, 4, 8)], ids=["packed", "padded"])
@pytest.mark.parametrize("stride, copied", [(2**23 - 8, False), (2**23, True)])
def test_rows_too_far_apart_for_32_bits_are_copied(shape, stride, copied):
    x = torch.randn(stride + 32, dtype=torch.float16).as_strided(shape, (0, stride, 8, 1)[-len(shape) :])
    found = addressable(x)
    assert (found is not x) == copied and torch.equal(found, x)
    assert found.stride()[-3:] == ((32 if copied else stride), 8, 1)


def test_strided_columns_are_copied():
    x = torch.randn(3, 8, 4).transpose(1, 2)
    assert addressable(x).is_contiguous() and torch.equal(addressable(x), x)
