from dataclasses import replace

import pytest
from matplotlib.image import imread

from flash_train.profiling.memory.longest import UNIT, Longest, Row, best_table, markdown, plot_longest, search


@pytest.mark.parametrize("true", [640, 5000, 131_072, 200_000])
@pytest.mark.parametrize("error", [0.99, 1.0, 1.01])
def test_a_good_guess_takes_few_trials(true, error):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= true

    found = search(fits, int(true * error), 10**7)
    assert found.within(0.02, 10**7) and len(tried) <= 4 and len(set(tried)) == len(tried)
    assert found.seq_len <= true < found.too_long
    assert true - found.seq_len <= max(UNIT, 0.02 * found.too_long)


@pytest.mark.parametrize("error", [0.8, 0.93, 1.07, 1.15])
def test_a_worse_guess_still_brackets_the_answer(error):
    found = search(lambda length: length <= 100_000, int(100_000 * error), 10**7)
    assert len(found.trials) == 4 or found.within(0.02, 10**7)
    assert 0 < found.seq_len <= 100_000 < found.too_long < 1.3 * found.seq_len


def test_the_limit_is_never_passed_and_ends_the_search():
    tried = []
    found = search(lambda length: tried.append(length) is None, 4096, 4000)
    assert tried == [3968] and found.seq_len == 3968 and found.within(0.02, 3968)
    assert max(length for length, _ in search(lambda length: True, 1000, 9000).trials) <= 9000


def test_search_ends_if_nothing_fits():
    found = search(lambda length: False, 1024, 4096)
    assert found.seq_len == 0 and len(found.trials) == 4
    assert search(lambda length: False, 10, 4096).trials == ((UNIT, False),)


def test_table_and_plot_of_the_longest_rows(tmp_path):
    limit, nothing = 1 << 20, Longest(0, None, ())
    rows = [
        Row("flash", "none", Longest(65536, 66560, ((65536, True), (66560, False))), 66000, 139.2, True, limit),
        Row("standard", "none", Longest(0, 64, ((64, False),)), 9000, None, False, limit, "oom", "out of memory at 64"),
        Row("flash", "checkpoint", Longest(262144, None, ((262144, True),)), 300000, 70.0, False, limit),
        Row("sdpa", "none", Longest(limit, None, ((limit, True),)), limit, 70.0, False, limit),
        *(Row("hopper", m, nothing, None, None, False, limit, "unavailable", "no GPU") for m in ("none", "selective")),
        Row("triton", "none", nothing, 640, None, False, limit, "failed", "the trial at 640 tokens: a bug"),
    ]
    rows = [replace(row, model="8b", optimizer="exact") for row in rows]
    rows[0] = replace(rows[0], step_seconds=12.34)
    text = markdown(rows, "title")
    assert text.splitlines()[2:-6] == [
        "| model | attention | memory | optimizer | longest row (tokens) | peak (GiB) | predicted (tokens) | step (s) "
        "| trials |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| 8b | flash | none | exact | 65,536 | 139.2 | 66,000 | 12.3 | 2 |",
        "| 8b | standard | none | exact | nothing fitted | – | 9,000 | – | 1 |",
        "| 8b | flash | checkpoint | exact | ≥ 262,144 | 70.0 | 300,000 | – | 1 |",
        "| 8b | sdpa | none | exact | ≥ 1,048,576 (the limit) | 70.0 | ≥ 1,048,576 | – | 1 |",
        "| 8b | hopper | none | exact | unavailable | – | – | – | 0 |",
        "| 8b | hopper | selective | exact | unavailable | – | – | – | 0 |",
        "| 8b | triton | none | exact | failed | – | 640 | – | 0 |",
    ]
    assert text.splitlines()[-5:] == [
        "(the limit): longer rows were not tried; find_max.limit=… allows them.",
        "",
        "- attention=standard, memory=none: nothing fitted: out of memory at 64",
        "- attention=hopper, memory=none, selective: unavailable: no GPU",
        "- attention=triton, memory=none: failed: the trial at 640 tokens: a bug",
    ]
    assert "(the limit)" not in markdown(rows[:3], "title")
    assert plot_longest(rows, tmp_path / "one.png", "title").stat().st_size > 5000
    plot_longest(rows[:1], tmp_path / "two.png", "title")
    several = [replace(rows[0], device=device) for device in ("NVIDIA H100", "NVIDIA H200")]
    plot_longest(several, tmp_path / "three.png", "title")
    assert imread(tmp_path / "three.png").shape[1] > imread(tmp_path / "two.png").shape[1]  # room for the cards' names


def test_the_longest_row_of_each_model_and_device():
    def row(model, device, seq_len, status="ok"):
        found = Longest(seq_len, None, ())
        return Row("flash", "none", found, None, 9.0, True, 4096, status, model=model, device=device)

    rows = [row("a", "x", 64), row("a", "x", 128), row("a", "x", 64), row("a", "y", 4096), row("b", "x", 0, "oom")]
    lines = best_table(rows).splitlines()
    assert [line.split(" | ")[4] for line in lines[2:4]] == ["128", "4,096 (the limit)"]
    assert lines[2].startswith("| x | `a` | `none` |") and lines[4:] == ["", "(the limit): longer rows were not tried."]
