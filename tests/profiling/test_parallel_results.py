"""Tables and the plot of several GPUs, from records."""

import pytest

from flash_train.profiling import parallel_results

COMMON = {"gpu": "G", "ranks": 2, "tokens": 16384}
DIRECTIONS = ("forward", "forward+backward")


def attention(case, documents, way, share, ms=(2.0, 8.0), **more):
    """Two records, whose rate in the forward is 600 TFLOP/s."""
    return [
        {**COMMON, "kind": "attention", "case": case, "documents": documents, "way": way, "direction": direction}
        | {"ms": time, "share": share, "tflops": tflops, **more}
        for direction, time, tflops in zip(DIRECTIONS, ms, (600.0, 525.0), strict=True)
    ]


def training(case, **more):
    record = {**COMMON, "case": case, "kind": "training", "model": "8b", "divided": "sharded", "way": "flash_train"}
    record |= {"tokens_per_second": 18000.0, "mfu": None, "peak_memory_gib": 70.04, "predicted_memory_gib": 70.01}
    return record | more


PACKED = [
    record
    for seed, documents, share in ((0, 3, 0.7), (1, 5, 0.9), (2, 4, 0.6))
    for way, own in (("one", 1.0), ("gather", share))
    for record in attention(f"p-seed{seed}-dropout0.1", documents, way, own, (2.0 + seed, 8.0 + seed))
]
DENSE = attention("a", 1, "one", 1.0, (4.0, 4.0)) + attention("a", 1, "gather", 0.8)
WRONG = {**COMMON, "kind": "attention", "case": "a", "way": "ulysses", "direction": "forward", "reason": "wrong result"}
COMPARED = [training("t", ratio=1.2), training("t", way="one", tokens_per_second=15000.0)]


def test_attention():
    section = parallel_results.attention_section([*DENSE, *PACKED, WRONG])
    # 600 TFLOP/s for 2 ms; the backward has 2.5 times the FLOPs in 6 ms
    assert "| a | 4.00 · 4.00 | 2.00 · 8.00 | 0.80 · 0.80 | 600 · 500 | – · – |\n" in section
    # the medians of three rows, and the worst share
    row = "| p-dropout0.1 | 3.00 · 9.00 | 3.00 · 9.00 | 0.70 · 0.70 (0.60 · 0.60) | 600 · 750 | – · – |"
    assert f"{row}\n" in section and "the median of 3 rows" in section and "queues" not in section


def test_queued_calls_come_before_single_ones():
    records = [*attention("a", 1, "one", 1.0), *attention("a", 1, "gather", 0.8)]
    for record, ms in zip(records, (2.0, 8.0, 1.0, 4.0), strict=True):
        record |= {"queued_ms": ms, "queued_share": 0.95, "queued_tflops": 1200.0}
    section = parallel_results.attention_section(records)
    assert "| 2.00 · 8.00 | 1.00 · 4.00 | 0.95 · 0.95 | 1200 · 1000 |" in section and "The host queues calls" in section


def test_training():
    row = "| 8b | 16,384 | sharded weights, a row each | 18,000 | – | 70.0 | 15,000 | 70.0 | 1.20 |"
    assert f"{row}\n" in parallel_results.training_section(COMPARED)


def test_long_rows():
    more = {
        "divided": "context",
        "memory": "selective",
        "keep": 0.0,
        "offload": 0.97,
        "step_seconds": 132.04,
        "mfu": 0.5,
    }
    section = parallel_results.long_section([training("l", **more), training("p", **more, documents=9), *COMPARED])
    assert (
        "| 8b | 16,384 | `selective`, 97% of the inputs in the host's memory | 132.0 | 9,000 | 50.0% | 70.0 | 70.0 |\n"
        in section
    )
    assert section.count("| 8b |") == 1  # neither packed rows nor rows that are not shared


def test_work_that_grows_with_the_gpus():
    records = [
        training(f"1b3-n-sharded-x{ranks}", model="1b3", ranks=ranks, tokens_per_second=1000.0 * ranks, mfu=mfu)
        for ranks, mfu in ((2, 0.45), (1, 0.5))
    ]
    section = parallel_results.weak_section([*records, *COMPARED])
    assert "| 1 | 1,000 | 50.0% | 1.000 |\n| 1b3 | a row of one document each | 2 | 1,000 | 45.0% | 0.900 |" in section


def test_the_plot(tmp_path):
    assert parallel_results.plot_parallel([*DENSE, *PACKED, *COMPARED], tmp_path / "parallel.png").is_file()
    with pytest.raises(ValueError, match="nothing to draw"):
        parallel_results.plot_parallel([WRONG], tmp_path / "none.png")
