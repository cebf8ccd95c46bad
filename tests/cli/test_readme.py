"""The tables and pictures of all pages agree with the records in docs/results."""

import json
import re
import shutil
from pathlib import Path

import pytest

from flash_train.profiling.ablation.row import Row
from flash_train.profiling.attention.plot import plot_attention
from flash_train.profiling.sources import source_line
from scripts.update_readme import INDEX, TABLES, about_graphs, fill, main, outdated, saved_by_flash, update
from tests.support.pages import marked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

RUN = {"attention": "flash", "seq_len": 16384, "tokens_per_second": 12345.6, "mfu": 0.5123, "peak_memory_gib": 31.96}
RUN |= {"train_loss_last_10": 1.23456, "status": "finished"}
CASE = {"case": "d128-h16-n2048-causal", "implementation": "triton", "dropout": 0.0}


@pytest.fixture
def results(tmp_path):
    def write(name, records):
        (tmp_path / f"{name}.json").write_text(json.dumps({"versions": {}, "records": records}))
        return tmp_path

    return write


def test_training(results):
    records = [RUN, {**RUN, "attention": "sdpa", "mfu": None}]
    filled = fill(marked("training", "old\n"), results("training", records))
    assert filled == marked(
        "training",
        "| attention | seq_len | tokens/s | MFU | peak GiB | loss (mean of last 10) |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| flash | 16,384 | 12,346 | 51.2% | 32.0 | 1.235 |\n"
        "| sdpa | 16,384 | 12,346 | – | 32.0 | 1.235 |\n"
        f"\n{source_line('training', records)}",
    )


def test_training_and_its_peer(results):
    card = {"gpu": "NVIDIA H200", "memory": "none"}
    record = {**card, "seq_len": 16384, "mfu": 0.55, "peak_memory_gib": 32.0, "tokens_per_second": 43210.0}
    record |= {"forward_seconds": 0.1, "backward_seconds": 0.27, "optimizer_seconds": 0.006}
    lost = {**card, "seq_len": 9, "implementation": "transformers", "reason": "out of memory"}
    assert "| 9 | none | transformers + Liger | – | – | – | – · – · – | – | – |\n" in fill(
        marked("training_peer"), results("training_peer", [lost])
    )
    ours = {**record, "implementation": "flash_train", "attention_seconds": 0.15, "ratio_to_transformers": 1.061}
    filled = fill(
        marked("training_peer"), results("training_peer", [ours, {**record, "implementation": "transformers"}])
    )
    assert "within 0.5 % (NVIDIA H200)." in filled.replace("\n", " ") and "less memory" not in filled
    assert "| 16,384 | none | this project | 43,210 | 55.0% | 32.0 | 100 · 270 · 6 | 150 | 1.06 |\n" in filled
    assert "| 16,384 | none | transformers + Liger | 43,210 | 55.0% | 32.0 | 100 · 270 · 6 | – | – |\n" in filled
    pair = [{**ours, "memory": "selective"}]
    pair.append({**record, "memory": "selective", "implementation": "transformers", "peak_memory_gib": 31.0})
    filled = fill(marked("training_peer"), results("training_peer", pair))
    assert "With 16,384 tokens the peer takes less memory" in filled.replace("\n", " ")


def test_the_first_step(results):
    record = {"case": "1b3-n16384", "gpu": "NVIDIA H200"}
    records = [{**record, "cache": "cold", "seconds": 23.3}, {**record, "cache": "warm", "seconds": 16.8}]
    assert fill(marked("start"), results("start", records)) == marked(
        "start",
        "From the command to the first optimizer step (`1b3-n16384`, `data=stdlib`, NVIDIA H200): 17 s;\n"
        f"the first time, with kernels to compile and text to tokenise, 23 s.\n\n{source_line('start', records)}",
    )


def test_attention(results):
    records = [
        {**CASE, "direction": "forward", "tflops": 400.4},
        {**CASE, "direction": "backward", "tflops": 333.3},
        {**CASE, "implementation": "cudnn", "direction": "forward", "tflops": 320.3},
        {**CASE, "implementation": "cudnn", "direction": "backward", "reason": "wrong result"},
    ]
    filled = fill(marked("attention_h200"), results("attention_h200", records))
    assert "| d128-h16-n2048-causal | 400 · 333 | 320 · – | 1.25 · – |\n" in filled
    records.append({**CASE, "implementation": "hopper", "direction": "forward", "tflops": 640.6})
    filled = fill(marked("attention_h200"), results("attention_h200", records))
    assert "| case | this project | cuDNN | ours / cuDNN |\n" in filled
    assert "| d128-h16-n2048-causal | 641 · – | 320 · – | 2.00 · – |\n" in filled
    assert "| case | portable |\n| --- | ---: |\n| d128-h16-n2048-causal | 400 · 333 |\n" in filled


def test_more_peers_have_columns_where_they_were_measured(results):
    packed = {"case": "d128-h16-packed65536-causal", "dropout": 0.0}
    records = [
        {**CASE, "direction": "forward", "tflops": 400.0},
        {**CASE, "implementation": "cudnn", "direction": "forward", "tflops": 200.0},
        {**CASE, "implementation": "flex", "direction": "forward", "tflops": 300.0},
        {**packed, "implementation": "triton", "direction": "forward", "tflops": 330.0},
        {**packed, "implementation": "varlen_attn", "direction": "forward", "tflops": 300.0},
    ]
    filled = fill(marked("attention_h200"), results("attention_h200", records))
    assert "| case | this project | cuDNN | ours / cuDNN |\n" in filled
    assert "| d128-h16-n2048-causal | 400 · – | 200 · – | 2.00 · – |\n" in filled
    assert "| d128-h16-packed65536-causal | 330 · – | – · – | – · – |\n" in filled
    assert "| case | FlexAttention | varlen_attn |\n" in filled
    assert "| d128-h16-packed65536-causal | – · – | 300 · – |\n" in filled
    packed_cudnn = {**packed, "implementation": "cudnn_packed", "direction": "forward", "tflops": 220.0}
    filled = fill(marked("attention_h200"), results("attention_h200", [*records, packed_cudnn]))
    assert "| d128-h16-packed65536-causal | 330 · – | 220 · – | 1.50 · – |\n" in filled


def test_flash_attention_4_has_a_column_and_a_ratio_where_it_was_measured(results):
    names = {"hopper": 650.0, "fa4": 520.0, "cudnn": 500.0, "flex": 300.0}
    records = [{**CASE, "implementation": name, "direction": "forward", "tflops": rate} for name, rate in names.items()]
    filled = fill(marked("attention_h200"), results("attention_h200", records))
    assert "| case | this project | cuDNN | FlashAttention-4 | ours / cuDNN | ours / FlashAttention-4 |\n" in filled
    assert "| 650 · – | 500 · – | 520 · – | 1.30 · – | 1.25 · – |\n" in filled
    assert "FlashAttention-3 is not measured." in filled
    without = [record for record in records if record["implementation"] != "fa4"]
    filled = fill(marked("attention_h200"), results("attention_h200", without))
    assert "ours / FlashAttention-4" not in filled
    assert "FlashAttention-3 and FlashAttention-4 are not measured." in " ".join(filled.split())
    longer = [{**record, "case": "d128-h16-n16384-causal", "tflops": 4 * record["tflops"]} for record in records[:2]]
    longer[1]["tflops"] /= 2  # twice the ratio
    filled = fill(marked("attention_h200"), results("attention_h200", records + longer))
    words = "Compared with FlashAttention-4, in the geometric mean of 2 cases: 1.77 x forward (lowest: 1.25)."
    assert words in " ".join(filled.split())


def test_sparse_cases_have_a_table_of_their_own(results):
    sparse = {"case": "d128-h16-n16384-full-sparse0.125", "density": 0.125, "tflops": 300.0}
    records = [
        {**CASE, "direction": "forward", "tflops": 400.0},
        {**sparse, "implementation": "triton", "direction": "forward", "time_to_dense": 0.157},
        {**sparse, "implementation": "triton", "direction": "backward", "time_to_dense": 0.2},
        {**sparse, "implementation": "flex", "direction": "forward", "reason": "wrong result"},
    ]
    dense, _, below = fill(marked("attention_h200"), results("attention_h200", records)).partition("\n\n")
    assert "| d128-h16-n2048-causal | 400 · – |" in dense and "sparse" not in dense
    assert "| case | blocks attended | this project | FlexAttention |\n" in below
    assert "| d128-h16-n16384-full-sparse0.125 | 12.5% | 0.157 · 0.200 | – · – |\n" in below


def test_a_picture_of_other_records_is_outdated(results, tmp_path):
    source, picture = results("attention_h200", [{**CASE, "direction": "forward", "tflops": 1.0}]), tmp_path / "a.png"
    source = source / "attention_h200.json"
    assert outdated(picture, source)  # there is none
    plot_attention(source, picture)
    assert not outdated(picture, source)
    results("attention_h200", [{**CASE, "direction": "forward", "tflops": 2.0}])
    assert outdated(picture, source)
    source.unlink()
    assert outdated(picture, source)


def test_recall(results):
    run = {
        "seq_len": 256,
        "attention": "sdpa",
        "device": "CPU",
        "steps": 600,
        "answer_accuracy": 0.987,
        "chance_level": 1 / 64,
    }
    filled = fill(marked("recall"), results("recall", [run]))
    assert "| 256 | sdpa | CPU | 600 | 98.7% | 1.6% |\n" in filled


def trial(seq_len, attention, seconds, status="ok", **parts):
    measured = {"step_seconds": 2 * seconds - 0.5, **parts}
    return Row({"dropout": 0.1, "seq_len": seq_len, "attention": attention}, status, None, measured)


def test_the_time_that_flash_saves_over_long_rows():
    rows = [trial(1024, "flash", 0.1), trial(1024, "sdpa", 1.0)]  # too short
    rows += [trial(8192, "flash", 0.9), trial(8192, "sdpa", 1.0)]  # without parts
    for flash, n in ((0.9, 16384), (1.0, 32768)):
        sdpa = 1.0 if n == 16384 else 2.0
        rows += [trial(n, "flash", flash, attention_seconds=flash), trial(n, "sdpa", sdpa, attention_seconds=sdpa)]
    rows += [trial(65536, "flash", 0.1), trial(65536, "sdpa", 1.0, "oom")]
    assert saved_by_flash(rows) == [
        "With dropout 0.1, a step with `flash` takes 13 to 57 % less time (8,192 tokens or more) than with `sdpa`, "
        "and attention alone 10 to 50 % less time (16,384 tokens or more)."
    ]


def test_an_ablation_says_which_trials_have_a_graph():
    whole, split = trial(4096, "flash", 1.0), trial(16384, "flash", 1.0, forward_seconds=0.5)
    assert about_graphs([whole]) == ""
    assert about_graphs([split]).startswith("The trials split each step into its parts")
    assert about_graphs([split, whole]).startswith("Trials without such parts ran as a training does")


def test_memory_results_fill_every_part(results):
    step = {"case": "125m-n2048-none-flash", "kind": "step", "status": "ok", "model": "125m", "attention": "flash"}
    step |= {"memory": "none", "seq_len": 2048, "predicted_bytes": 2**31, "measured_bytes": 2**31 + 2**20}
    own = {"case": "a", "kind": "attention", "status": "ok", "attention": "flash", "seq_len": 8192, "own_bytes": 2**30}
    moved = {"case": "t", "kind": "traffic", "status": "unavailable", "reason": "no ncu", "attention": "flash"}
    moved |= {"seq_len": 4096, "direction": "forward", "algorithm_bytes": 2**30}
    folder = results("memory", [step, own, moved])
    for name, line in {
        "memory": "| flash | none | 1 of 1 | 2,048 | 2.00 | -0.05% |",
        "memory.steps": "| 125m-n2048-none-flash | 2.00 | 2.00 | -0.05% | – |",
        "memory.growth": "| 8,192 | 1,024 |",
        "memory.traffic": "| flash | 4,096 | forward | 1,024 | – | – | no ncu |",
    }.items():
        assert line + "\n" in fill(marked(name), folder)


def test_without_results_a_table_is_empty(tmp_path):
    assert fill(marked("training", "old\n"), tmp_path) == marked("training")


def test_an_unknown_table_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="results:speed is unknown"):
        fill(marked("speed"), tmp_path)


def test_the_pages_are_up_to_date():
    assert main(["--check"]) == 0, "run: make readme"


@pytest.mark.parametrize("name", [INDEX, *TABLES])
def test_each_table_is_in_a_page(name):
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert f"<!-- results:{name} -->" in pages and f"<!-- /results:{name} -->" in pages


def test_every_page_with_a_table_is_checked(tmp_path):
    """A page that `update` does not read would keep old figures."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    assert update(tmp_path, check=True) == 0
    with_tables = [page.relative_to(ROOT) for page in PAGES if "<!-- results:" in page.read_text(encoding="utf-8")]
    assert len(with_tables) >= 4
    for page in with_tables:
        text = (tmp_path / page).read_text(encoding="utf-8")
        changed = re.sub(r"(<!-- results:[\w.]+ -->\n)", r"\1another figure\n", text, count=1)
        (tmp_path / page).write_text(changed, encoding="utf-8")
        assert update(tmp_path, check=True) == 1, page
        (tmp_path / page).write_text(text, encoding="utf-8")


def test_the_short_tables(results):
    case = {"case": "d128-h16-n16384-causal", "gpu": "a card", "dropout": 0.0}
    records = [
        {**case, "implementation": "hopper", "direction": "forward", "tflops": 700.4},
        {**case, "implementation": "cudnn", "direction": "forward", "tflops": 500.0},
        {**CASE, "implementation": "hopper", "direction": "forward", "tflops": 1.0, "gpu": "a card"},
    ]
    filled = fill(marked("attention_h200.summary"), results("attention_h200", records))
    assert "| head_dim 128, causal | 700 · – | 500 · – |\n" in filled and "(a card)" in filled
    assert "n2048" not in filled
    record = {"case": "a", "gpu": "a card", "memory": "none", "seq_len": 16384, "mfu": 0.5, "peak_memory_gib": 32.0}
    ours = {**record, "implementation": "flash_train", "tokens_per_second": 43210.0, "ratio_to_transformers": 1.08}
    lost = {**record, "implementation": "transformers", "mfu": None, "peak_memory_gib": None, "reason": "oom"}
    filled = fill(marked("training_peer.summary"), results("training_peer", [ours, lost]))
    assert "| 16,384 | none | 43,210 | – | 1.08 | 50.0% | – | 32.0 | – |\n" in filled
