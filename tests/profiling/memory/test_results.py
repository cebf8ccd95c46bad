"""The memory benchmark's tables and plot, from invented records."""

import pytest

from flash_train.profiling.memory.results import (
    allowed_error,
    cases_table,
    compared,
    first_modes_table,
    growth_table,
    plot_memory_results,
    summary_table,
    traffic_table,
    worst_error,
)

GIB = 2**30


def step(model: str, length: int, memory: str, measured: float | None, predicted: float, attention: str = "flash"):
    record = {
        "case": f"{model}-n{length}-{memory}-{attention}",
        "kind": "step",
        "predicted_bytes": round(predicted * GIB),
    }
    if measured is None:
        return record | {"status": "unavailable", "reason": "too large"}
    settings = {"model": model, "seq_len": length, "memory": memory, "attention": attention}
    sizes = {"measured_bytes": round(measured * GIB), "reserved_bytes": round(1.1 * measured * GIB), "left_bytes": 0}
    return record | settings | sizes | {"status": "ok", "seconds": 3.0}


STEPS = [
    step("125m", 2048, "none", 2.0, 2.01),
    step("125m", 4096, "none", 4.0, 3.9),
    step("125m", 4096, "none", 8.0, 8.1, "standard"),
    step("1b3", 4096, "checkpoint", 20.0, 22.0),
    step("1b3", 131072, "none", None, 218.0),
]
OWN = [
    {
        "case": f"attention-{name}-n{n}", "kind": "attention", "status": "ok", "attention": name, "seq_len": n,
        "own_bytes": size,
    }
    for n in (8192, 16384)
    for name, size in (("flash", 64 * 1024 * n), ("standard", 64 * n * n))
]  # fmt: skip
OWN.append(
    {"case": "attention-standard-n65536", "kind": "attention", "status": "oom", "reason": "no", "attention": "standard",
     "seq_len": 65536}
)  # fmt: skip
TRAFFIC = [
    {
        "case": "traffic-forward-flash-n4096", "kind": "traffic", "status": "ok", "attention": "flash", "seq_len": 4096,
        "direction": "forward", "algorithm_bytes": 100 * 2**20, "read_bytes": 30 * 2**20, "written_bytes": 20 * 2**20,
    },
    {
        "case": "traffic-backward-flash-n4096", "kind": "traffic", "status": "unavailable", "reason": "no ncu",
        "attention": "flash", "seq_len": 4096, "direction": "backward", "algorithm_bytes": 2**20,
    },
]  # fmt: skip
RECORDS = [*STEPS, *OWN, *TRAFFIC]


def test_allowed_error_is_the_larger_of_two_bounds():
    assert allowed_error(GIB) == 64 * 2**20 and allowed_error(10 * GIB) == 0.5 * GIB
    assert [round(record["error_bytes"] / GIB, 2) for record in compared(RECORDS)] == [0.01, -0.1, 0.1, 2.0]


def test_summary_has_the_largest_error_of_each_mode():
    assert summary_table(RECORDS).splitlines()[2:] == [
        "| flash | none | 2 of 2 | 4,096 | 4.00 | -2.50% |",
        "| flash | checkpoint | 0 of 1 | 4,096 | 20.00 | +10.00% |",
        "| standard | none | 1 of 1 | 4,096 | 8.00 | +1.25% |",
    ]


def test_the_worst_error_is_of_all_measured_steps():
    assert worst_error(RECORDS) == (
        "4 steps were measured. The largest error of a prediction is 10.00% (`1b3-n4096-checkpoint-flash`)."
    )


def test_the_first_mode_that_fits_a_card():
    steps = [
        step("125m", 2048, "none", 20.0, 20.0),
        step("1b3", 8192, "none", 30.0, 30.0),
        step("1b3", 8192, "selective", 21.0, 21.0),
        step("1b3", 4096, "none", None, 90.0),
        step("1b3", 4096, "checkpoint", 50.0, 50.0),
        step("1b3", 4096, "none", 1.0, 1.0, "standard"),
    ]
    assert first_modes_table([*steps, *OWN]).splitlines() == [
        "| model | seq_len | 24 GB | 48 GB | 80 GB |",
        "| --- | --- | --- | --- | --- |",
        "| 1b3 | 4,096 | – | – | checkpoint |",
        "| 1b3 | 8,192 | selective | none | none |",
    ]


def test_every_step_has_a_row():
    lines = cases_table(RECORDS).splitlines()[2:]
    assert len(lines) == len(STEPS)
    assert lines[0] == "| 125m-n2048-none-flash | 2.01 | 2.00 | +0.50% | 2.20 |"
    assert lines[-1] == "| 1b3-n131072-none-flash | 218.00 | more than the card has | – | – |"


def test_growth_table_has_exponents():
    assert growth_table(RECORDS).splitlines()[2:] == [
        "| 8,192 | 512 | 4,096 |",
        "| 16,384 | 1,024 | 16,384 |",
        "| 65,536 | – | oom |",
        "| exponent from 8,192 on | 1.00 | 2.00 |",
    ]


def test_traffic_table_has_figures_or_a_reason():
    assert traffic_table(RECORDS).splitlines()[2:] == [
        "| flash | 4,096 | forward | 100 | 30 | 20 | 0.50 |",
        "| flash | 4,096 | backward | 1 | – | – | no ncu |",
    ]


@pytest.mark.parametrize("records", [RECORDS, STEPS[:1], OWN])
def test_plots_of_few_and_many_records(records, tmp_path):
    path = plot_memory_results(records, tmp_path / "memory.png", metadata={"Source": "abc"})
    assert path.stat().st_size > 10_000 and b"Source\x00abc" in path.read_bytes()


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_memory_results(STEPS[-1:], tmp_path / "memory.png")


def test_tables_of_no_records_and_of_zeros():
    for table in (summary_table, cases_table, growth_table, traffic_table):
        assert len(table([]).splitlines()) in (2, 3)
    step = STEPS[0] | {"measured_bytes": 0, "predicted_bytes": 0}
    assert cases_table([step]).splitlines()[-1].split(" | ")[3] == "–"
    assert summary_table([step]).splitlines()[-1].endswith("| – |")
    call = {"kind": "traffic", "status": "ok", "attention": "flash", "seq_len": 64, "direction": "forward"}
    call |= {"algorithm_bytes": 0, "read_bytes": 0, "written_bytes": 0}
    assert traffic_table([call]).splitlines()[-1].endswith("| – |")
