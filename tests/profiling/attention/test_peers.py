"""The attention benchmark: its cases, and its refusal of wrong results. Only the timing needs a GPU."""

import json
from dataclasses import replace

import pytest
import torch

from flash_train.attention import attended_pairs, attention
from flash_train.profiling.attention import comparison, peers
from flash_train.profiling.attention.cases import Case, cases, log_normal_lengths
from flash_train.profiling.attention.comparison import add_ratios, check, measure
from flash_train.profiling.attention.peers import OURS, build
from flash_train.profiling.attention.plot import fingerprint, plot_attention

SMALL = Case(16, 4, 2, 256, True)
KINDS = {
    "causal": SMALL,
    "full": Case(16, 2, 2, 256, False),
    "packed": Case(16, 2, 2, 0, True, lengths=(100, 28, 128)),
    "sparse": Case(16, 2, 2, 512, False, density=0.25),
    "sparse-causal": Case(16, 2, 2, 512, True, density=0.5),
}


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """FlexAttention without its compiler, and one batch row."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(Case, "batch", property(lambda case: 2))


def test_names_are_distinct():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert "d128-h32/8-n65536-causal" in names and "d128-h16-n16384-full-sparse0.125" in names


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_counted_from_attended_pairs(kind):
    """A causal case counts half of the square, which leaves out half of the diagonal."""
    case = KINDS[kind]
    pairs = case.flops / (4 * case.n_heads * case.head_dim)
    lengths = list(case.lengths) or [case.seq_len] * case.batch
    exact = attended_pairs(lengths, case.spec("cpu").mask)
    if kind == "sparse-causal":
        assert 0 < exact < sum(n * n for n in lengths) / 2  # drawn blocks may lie above the diagonal
    else:
        assert exact - pairs == (sum(lengths) / 2 if case.causal else 0)


def test_document_lengths_add_up():
    lengths = log_normal_lengths(65536)
    assert sum(lengths) == 65536 and min(lengths) > 0 and max(lengths) > 8 * min(lengths)


def test_sparse_rows_have_equally_many_blocks():
    mask = replace(KINDS["sparse"], seq_len=2048).spec("cpu").mask
    assert mask.pattern.sum(-1).tolist() == [4] * 16
    assert torch.equal(mask.pattern, replace(KINDS["sparse"], seq_len=2048).spec("cpu").mask.pattern)


@pytest.fixture
def ours_in_pytorch(monkeypatch):
    """Plain PyTorch in place of the kernels, which this machine may not run."""

    def standard(*args, **options):
        return attention(*args, **options | {"backend": "standard"})

    monkeypatch.setattr(peers, "attention", standard)


@pytest.mark.parametrize("kind", KINDS)
def test_correct_results_pass_and_wrong_ones_fail(kind, ours_in_pytorch):
    case = KINDS[kind]
    tensors = case.inputs("cpu", torch.float32)
    call = build(OURS, case, "cpu")
    assert check(OURS, call, case, tensors) < 1e-5
    assert check(OURS, lambda q, k, v: call(q, k, v * 1.05), case, tensors) > 0.04

    def only_the_gradient(q, k, v):
        return call(q, k, v.detach() + (v - v.detach()) * 1.05)

    assert check(OURS, only_the_gradient, case, tensors) > 0.04
    other = build(OURS, replace(case, causal=not case.causal), "cpu")
    assert check(OURS, other, case, tensors) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_flex_computes_the_case(kind):
    """Its output alone: it has no backward on a CPU."""
    case = KINDS[kind]
    q, k, v = (x.detach() for x in case.inputs("cpu", torch.float32))
    want = attention(q, k, v, case.spec("cpu"), packing=case.packing("cpu"), backend="reference")
    torch.testing.assert_close(build("flex", case, "cpu")(q, k, v), want)


@pytest.mark.parametrize("kind", ["causal", "full"])
def test_pytorchs_attention_computes_the_case(kind):
    case = KINDS[kind]
    tensors = case.inputs("cpu", torch.float32)
    assert check("fa2", build("fa2", case, "cpu"), case, tensors) < 1e-5


def test_peer_with_dropout_is_checked_without_dropout():
    case = replace(KINDS["full"], dropout=0.1)
    tensors = case.inputs("cpu", torch.float32)
    assert check("fa2", build("fa2", case, "cpu"), case, tensors) < 1e-5


def test_our_dropout_is_checked_against_its_mask(ours_in_pytorch):
    """In a row and a head that are drawn for each call."""
    case = replace(SMALL, dropout=0.3)
    for _ in range(4):
        tensors = case.inputs("cpu", torch.float32)
        assert check(OURS, build(OURS, case, "cpu"), case, tensors) < 1e-5


def timer(call):
    call()
    return 2.0


def test_each_direction_has_a_record():
    forward, backward = measure(["fa2"], SMALL, timer, "cpu")
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert forward["tflops"] == SMALL.flops / 2.0 / 1e9 and backward["tflops"] == 2.5 * forward["tflops"]
    assert 0 < forward["error"] < 1e-2 and "time_to_dense" not in forward


def test_a_sparse_case_is_compared_with_dense(ours_in_pytorch, monkeypatch):
    monkeypatch.setattr(comparison, "ROUNDS", 3)
    times = iter([1.0, 3.0, 4.0, 6.0] + [9.0, 2.0, 9.0, 5.0] + [0.5, 7.0, 3.0, 8.0])  # of three turns

    def clock(call):
        call()
        return next(times)

    forward, backward = measure([OURS], KINDS["sparse"], clock, "cpu")
    assert (forward["time_to_dense"], backward["time_to_dense"]) == (0.25, 0.5)
    assert forward["ms"] == 1.0


def test_implementations_are_timed_in_interleaved_rounds(monkeypatch):
    """No implementation always runs later or after the same one, and one that fails does not affect the others."""
    right, order = build("fa2", SMALL, "cpu"), []

    def built(name, *_):
        def call(q, k, v):
            order.append(name)
            if name == "flex" and order.count("flex") > 4:
                raise RuntimeError("no longer\nat all")
            return right(q, k, v)

        return call

    monkeypatch.setattr(comparison, "build", built)
    names = ["fa2", "flex", "cudnn"]
    records = measure(names, SMALL, timer, "cpu")
    assert [row["implementation"] for row in records] == ["fa2", "fa2", "flex", "cudnn", "cudnn"]
    assert records[2]["reason"] == "no longer"
    turns = order[len(names) :: 2]  # a turn calls the forward twice
    assert sorted(turns[:3]) == sorted(turns[3:6]) == sorted(names)
    rest = [tuple(turns[i : i + 2]) for i in range(6, len(turns), 2)]
    assert len(rest) == comparison.ROUNDS - 2 and set(rest) == {("fa2", "cudnn"), ("cudnn", "fa2")}

    order.clear()
    measure(names, SMALL, timer, "cpu")
    assert order[len(names) :: 2] == turns, "the order is no different in another run"


def test_rate_is_from_the_median_round():
    clock = iter([9.0, 9.0] * 3 + [2.0, 3.0] * 4)

    def slow_at_first(call):
        call()
        return next(clock)

    assert [record["ms"] for record in measure(["fa2"], SMALL, slow_at_first, "cpu")] == [2.0, 3.0]


def test_implementation_that_cannot_run_gives_a_reason():
    (record,) = measure(["flex"], replace(SMALL, dropout=0.1), timer, "cpu")
    assert record["reason"] == "flex has no dropout" and "tflops" not in record
    if not torch.cuda.is_available():
        (record,) = measure([OURS], SMALL, timer, "cpu")
        assert "no NVIDIA GPU" in record["reason"] and "tflops" not in record


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_wrong_result_gets_no_rate(monkeypatch, factor):
    right = build("fa2", SMALL, "cpu")
    monkeypatch.setattr(comparison, "build", lambda *_: lambda q, k, v: right(q, k, v) * factor)
    (record,) = measure(["fa2"], SMALL, timer, "cpu")
    assert record["reason"] == "wrong result" and "tflops" not in record and "ms" not in record


def test_ratios():
    def row(name, direction, rate):
        return {"implementation": name, "direction": direction, "tflops": rate}

    rows = [row(OURS, "forward", 300.0), row(OURS, "backward", 200.0), row("fa2", "forward", 150.0)]
    rows += [
        row("fa2", "backward", 400.0),
        {"implementation": "flex", "direction": "forward", "reason": "wrong result"},
    ]
    add_ratios(rows)
    assert (rows[0]["ratio_to_fa2"], rows[1]["ratio_to_fa2"]) == (2.0, 0.5)
    assert rows[0]["ratio_to_flex"] is None and "ratio_to_triton" not in rows[0]
    assert "ratio_to_fa2" not in rows[-1]


def test_plot_stores_the_fingerprint_of_its_records(tmp_path):
    source, picture = tmp_path / "a.json", tmp_path / "a.png"
    records = measure(["fa2"], SMALL, timer, "cpu") + measure(["flex"], replace(SMALL, dropout=0.1), timer, "cpu")
    source.write_text(json.dumps({"records": records}))
    assert plot_attention(source, picture) == picture
    assert picture.read_bytes().startswith(b"\x89PNG") and fingerprint(source).encode() in picture.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
    source.write_text(json.dumps({"records": [records[-1]]}))
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_attention(source, picture)
