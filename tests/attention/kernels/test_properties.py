"""Random cases of the contract on any machine, and the program for long runs."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from tests.support.attention import fuzz
from tests.support.attention.cases.drawn import CARD, SMALL, cases, problem, variant
from tests.support.attention.cases.problem import FAR_STEP, STRIDED, Case, arrange
from tests.support.attention.cases.recipes import Blocks
from tests.support.attention.contract import run
from tests.support.processes import python_path

ROOT = Path(__file__).parents[3]
ANY_DTYPE = replace(SMALL, dtypes=(torch.float32, torch.float16, torch.bfloat16))


def has_triton():
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


LIMITS = ANY_DTYPE if has_triton() else replace(ANY_DTYPE, rules=())


@pytest.mark.parametrize("backend", ["standard", "chunked"])
def test_dense_backends(backend):
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases(LIMITS))
    def holds(case):
        assert all(e.ok for e in run(case, backend, "cpu")), case.source

    holds()


def command(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.attention.fuzz", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=1200, env=os.environ | variables,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    """Hypothesis draws the cases, so that it can shrink a failure."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.attention.cases.drawn", "20"],
        cwd=ROOT, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 20, done.stdout


@pytest.mark.slow
def test_seeded_draws_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    status, said = command("--draws", 16, "--seed", 1, "--workers", 2)
    assert status == 0, said
    assert "seed 1: 16 draws, 16 variants, 0 failures" in said


def drawn(seed, limits):
    pick = random.Random(seed).choice
    return problem(variant(pick, limits), pick)


@pytest.mark.parametrize("limits", [SMALL, CARD], ids=["small", "card"])
def test_draws_cover_all_options(limits):
    """Every option is drawn, and often."""
    some = [drawn(seed, limits) for seed in range(600)]
    shown = {
        "terms": {type(term).__name__ for case in some for term in case.terms},
        "composed": {len(case.terms) for case in some},
        "bands": {type(case.band).__name__ for case in some},
        "slopes": {case.slopes for case in some},
        "uses": {case.uses for case in some},
        "strided": {case.strided for case in some},
        "dout": {case.dout for case in some},
        "far": {case.far for case in some},
        "dtypes": {case.dtype for case in some},
    }
    assert shown == {
        "terms": {"Blocks", "Documents", "Nodes", "Rule"},
        "composed": {0, 1, 2},
        "bands": {"Full", "Causal", "Window"},
        "slopes": {"", "heads", "entries"},
        "uses": {"both", "plain", "out", "lse"},
        "strided": {"", *STRIDED},
        "dout": {"dense", "row", "scalar", *STRIDED},
        "far": {"", "q", "k", "v", "dout"} if limits.far else {""},
        "dtypes": set(limits.dtypes),
    }
    for share in (
        [case.packed for case in some],
        [bool(case.dropout) for case in some],
        [case.sinks for case in some],
        [bool(case.softcap) for case in some],
        [any(0 in pair for pair in case.lengths) for case in some],
        [any(a > b for a, b in case.lengths) for case in some],
        [any(a < b for a, b in case.lengths) for case in some],
        [case.v_head_dim is not None for case in some],
        [case.head_dim % 2 == 1 for case in some],
        [case.heads != case.kv_heads for case in some],
        [bool(case.strided) for case in some],
    ):
        assert 0.04 < sum(share) / len(some) < 0.95
    assert {case.head_dim for case in some} == set(limits.head_dims)


@pytest.mark.parametrize("strided", STRIDED)
@pytest.mark.parametrize("packed", [False, True])
def test_strided_inputs_have_the_same_numbers(strided, packed):
    x = torch.randn(6, 4, 8) if packed else torch.randn(2, 6, 4, 8)
    placed = arrange("q", x, Case("strided", ((6, 6),), strided=strided, packed=packed))
    assert torch.equal(placed, x) and not placed.is_contiguous()


def test_far_rows_have_the_same_numbers():
    x = torch.randn(2, 3, 4, 8)
    placed = arrange("k", x, Case("far", ((3, 3),), far="k"))
    assert torch.equal(placed, x) and placed.stride() == (3 * FAR_STEP, FAR_STEP, 8, 1)
    assert arrange("k", x[:, :0], Case("far", ((0, 0),), far="k")).shape == (2, 0, 4, 8)
    assert 127 * FAR_STEP >= 2**31


def test_a_printed_case_evaluates_to_the_case():
    from flash_train.attention.masks import Causal, Full, Window
    from tests.support.attention.cases.recipes import Documents, Nodes, Rule

    names = {x.__name__: x for x in (Case, Causal, Full, Window, Blocks, Documents, Nodes, Rule)} | {"torch": torch}
    for seed in range(50):
        case = drawn(seed, SMALL)
        assert eval(case.source, names) == case


def test_draws_are_reproducible():
    here, on_card = fuzz.Subject(3, "cpu"), fuzz.Subject(0, "cuda")
    assert fuzz.draw(here, 17) == fuzz.draw(here, 17)
    assert fuzz.draw(here, 17) != fuzz.draw(replace(here, seed=4), 17)
    one, other, next_variant = (fuzz.draw(on_card, number) for number in (199, 150, 200))
    static = ("heads", "kv_heads", "head_dim", "v_head_dim", "terms", "dropout", "packed", "strided", "dtype", "slopes")
    assert [getattr(one, name) for name in static] == [getattr(other, name) for name in static]
    assert [getattr(one, name) for name in static] != [getattr(next_variant, name) for name in static]


def test_draws_for_hopper_have_a_backward():
    """Hopper's backward takes one block pattern for the heads that share keys."""
    on_card = fuzz.Subject(0, "cuda", "hopper")
    draws = [fuzz.draw(on_card, 100 * group) for group in (*range(60), 1000)]
    blocks = [(case, term) for case in draws for term in case.terms if isinstance(term, Blocks)]
    assert any(term.per_head for _, term in blocks)
    assert all(case.heads == case.kv_heads for case, term in blocks if term.per_head)


def test_fuzz_record_is_read_back_after_an_interruption(tmp_path):
    path = tmp_path / "state.json"
    subject = fuzz.Subject(5, "cpu")
    record = fuzz.Record(subject, path, done={0, 1, 2, 3, 9}, failures={9: "dq: error"})
    record.save()
    again = fuzz.Record.resume(subject, path)
    assert (again.done, again.failures) == (record.done, record.failures)
    assert json.loads(path.read_text())["done"] == [[0, 4], [9, 10]]
    assert list(tmp_path.iterdir()) == [path]
    assert list(fuzz.Run(again, range(2, 12), workers=0)._groups()) == [[4], [5], [6], [7], [8], [10], [11]]
    on_card = fuzz.Record(replace(subject, device="cuda"), done={*range(100), 150})
    groups = list(fuzz.Run(on_card, range(50, 230), workers=0)._groups())
    assert groups == [[*range(100, 150), *range(151, 200)], [*range(200, 230)]]
    for other in (replace(subject, seed=6), replace(subject, backend="hopper")):
        with pytest.raises(SystemExit, match="is of .*'seed': 5"):
            fuzz.Record.resume(other, path)


PLANT = """
import os, sys
sys.argv = ["fuzz", "--draws", "8", "--workers", "2", "--state", sys.argv[1]]
from tests.support.attention import fuzz
def judge(subject, number):
    if number == 1:
        os._exit(9)
    if number == 6:
        raise RuntimeError("a planted error")
    return "dq: planted" if number == 2 else ""
fuzz.judge = judge
if __name__ == "__main__":
    sys.exit(fuzz.main())
"""


@pytest.mark.slow
def test_failures_name_their_draws(tmp_path):
    """A wrong answer, an error, and a worker that dies are all reported, and the other draws still run."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    (tmp_path / "planted.py").write_text(PLANT)
    state = tmp_path / "state.json"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "planted.py"), str(state)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(map(int, re.findall(r"FAILED seed 0 draw (\d+)", done.stdout))) == [1, 2, 6], done.stdout
    assert "the worker died with exit status 9" in done.stdout
    assert "a planted error" in done.stdout
    assert fuzz.draw(fuzz.Subject(0, "cpu"), 2).source in done.stdout
    assert "8 draws, 8 variants, 3 failures" in done.stdout
    assert json.loads(state.read_text())["done"] == [[0, 8]]
