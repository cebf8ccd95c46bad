"""Dense backends fulfil the contract, and the contract detects wrong results."""

from dataclasses import replace

import pytest
import torch

from flash_train.attention import Causal, functional
from flash_train.attention.dense.sdpa import sdpa_unavailable
from tests.support.attention import contract
from tests.support.attention.cases.named import BY_NAME, CASES, KEPT, in_dtypes
from tests.support.attention.cases.problem import Case, build
from tests.support.attention.contract import run

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# every logit is where tanh is flat
SATURATED = Case("far-from-0-softcap", ((50, 50),), offset=200.0, softcap=50.0)


def needs_triton(case):
    if any(type(term).__name__ == "Rule" for term in case.terms):
        pytest.importorskip("triton", reason="Triton exists for Linux only")


@pytest.mark.parametrize("backend", ["reference", "standard", "chunked"])
@pytest.mark.parametrize(
    "case", [*in_dtypes(DTYPES), *KEPT, *(replace(SATURATED, dtype=dtype) for dtype in DTYPES)], ids=str
)
def test_dense_backends_fulfil_the_contract(case, backend):
    needs_triton(case)
    errors = run(case, backend, "cpu")
    assert {"out", "lse", "dq", "dk", "dv"} - {e.tensor for e in errors} <= ({"lse"} if case.uses == "plain" else set())
    assert all(e.ok for e in errors), errors


def plain(case):
    """Return whether PyTorch's fused attention can run the case. Its dropout differs, and it has no log-sum-exp."""
    return replace(case, dropout=0.0, origin=(0, 0, 0, 0), sinks=False, softcap=0.0, uses="plain")


@pytest.mark.parametrize("case", [plain(case) for case in in_dtypes(DTYPES)], ids=str)
def test_sdpa_fulfils_the_contract(case):
    needs_triton(case)
    errors = run(case, "sdpa", "cpu")
    assert {"out", "dq", "dk", "dv"} <= {e.tensor for e in errors}
    slack = 2 if case.dtype == torch.float32 else 1  # the exponential of PyTorch's CPU kernels is exact to 20 bits
    assert all(e.error <= slack * e.allowed for e in errors), errors


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_sdpa_names_unsupported_features(name):
    case = BY_NAME[name]
    assert name in sdpa_unavailable(build(case, "cpu").spec, sinks=case.sinks)
    with pytest.raises(ValueError, match=f"the sdpa backend cannot run this: it has no {name}"):
        run(replace(case, uses="plain"), "sdpa", "cpu")


@pytest.mark.slow
def test_chunked_fulfils_the_contract_for_small_chunks(monkeypatch):
    """The chunks are small, so that each case has many."""
    whole = functional.DENSE["chunked"]

    def small(*args, **options):
        return whole(*args, **options, query_chunk=24, key_chunk=17)

    monkeypatch.setitem(functional.DENSE, "chunked", small)
    for case in CASES:
        if all(type(term).__name__ != "Rule" for term in case.terms):
            assert all(e.ok for e in run(case, "chunked", "cpu")), case


# changes to a correct answer that the contract must detect: (case, change, tensor)
def _late(out, lse):
    return torch.where(torch.arange(out.shape[1])[:, None, None] == out.shape[1] - 1, out * 1.01, out), lse


def _without_log_sum_exp(out, lse):
    return out, lse.detach() + 0 * out.sum()


def _nan_where_nothing_is_seen(out, lse):
    return torch.where(lse.transpose(1, 2)[..., None].isinf(), float("nan"), out), lse


def _large_where_nothing_is_seen(out, lse):
    return out, lse.nan_to_num(neginf=-1e30)


def _coarse(out, lse):
    return out.to(torch.bfloat16).to(out.dtype), lse


def wrong_tensors(case):
    """Names of the tensors of ``standard`` that the contract rejects."""
    try:
        return [e.tensor for e in run(case, "standard", "cpu") if not e.ok]
    except AssertionError as error:
        return [str(error).split(":")[0]]


WRONG = [
    ("causal", _late, "out"),
    ("causal", _coarse, "out"),
    ("causal", _without_log_sum_exp, "dq"),
    ("fully-masked-rows", _nan_where_nothing_is_seen, "out"),
    ("fully-masked-rows", _large_where_nothing_is_seen, "lse"),
]


@pytest.mark.parametrize(("name", "change", "tensor"), WRONG, ids=[f"{n}-{c.__name__[1:]}" for n, c, _ in WRONG])
def test_the_contract_detects_wrong_results(name, change, tensor, monkeypatch):
    whole = functional.DENSE["standard"]
    monkeypatch.setitem(functional.DENSE, "standard", lambda *args, **options: change(*whole(*args, **options)))
    assert tensor in wrong_tensors(BY_NAME[name])


@pytest.mark.parametrize("name", ["window", "scale", "dropout", "softcap", "alibi", "sinks", "packed", "documents"])
def test_the_contract_detects_a_changed_setting(name, monkeypatch):
    """The backend computes with one setting changed: the contract depends on each part of a call."""
    other = {
        "window": {"band": Causal()},
        "scale": {"scale": 0.901},
        "dropout": {"dropout": 0.104},
        "softcap": {"softcap": 2.01},
        "alibi": {"slopes": ""},
        "sinks": {"sinks": False},
        "packed": {"lengths": ((41, 41), (1, 1), (69, 69), (16, 16))},
        "documents": {"terms": ()},
    }[name]
    case = BY_NAME[name]
    honest = contract.attend

    def attend(problem, case, leaves, backend):
        wrong = build(replace(case, **other), "cpu")
        problem = replace(problem, spec=wrong.spec, packing=wrong.packing)
        return honest(problem, case, {n: x for n, x in leaves.items() if n in wrong.inputs}, backend)

    monkeypatch.setattr(contract, "attend", attend)
    assert wrong_tensors(case)
