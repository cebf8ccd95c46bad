"""An ablation's plots: the fitted exponent, and plots of one trial and of many."""

import io
import math
from dataclasses import replace

import matplotlib.image
import pytest

from flash_train.profiling.ablation import plot as ablation_plot
from flash_train.profiling.ablation.plot import _spaced_labels, fit_exponent, plot_ablation, plot_losses
from flash_train.profiling.ablation.row import Row

AXES = {"model": "nano", "memory": "none", "attention": "sdpa"}


def row(n, attention="sdpa", memory="none", status="ok"):
    measured = {"step_seconds": 1e-9 * n**2, "peak_memory_gib": n / 1024, "train_loss": 3.0}
    losses = {step: 6 / step for step in range(1, 4)}
    axes = {**AXES, "seq_len": n, "attention": attention, "memory": memory}
    return Row(axes, status, None, measured if status == "ok" else {}, losses if status == "ok" else {})


@pytest.mark.parametrize("power", [0.0, 1.0, 1.87, 2.0])
def test_exponent_of_a_power_is_exact(power):
    lengths = [256, 512, 1024, 4096]
    assert fit_exponent(lengths, [3e-7 * n**power for n in lengths]) == pytest.approx(power, abs=1e-12)


def test_the_exponent_of_noisy_data_is_near():
    lengths = [2**i for i in range(8, 18)]
    values = [n**1.5 * math.exp(0.05 * (-1) ** i) for i, n in enumerate(lengths)]
    assert fit_exponent(lengths, values) == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize(("lengths", "values"), [([], []), ([64], [1.0]), ([64, 64], [1.0, 2.0]), ([64, 128], [0, 1])])
def test_no_exponent_below_two_lengths(lengths, values):
    assert fit_exponent(lengths, values) is None


CASES = {
    "one": [row(64)],
    "backends": [row(64, name) for name in ("standard", "sdpa", "flash", "chunked", "auto", "reference")],
    "two": [row(64), row(64, "auto")],
    "twenty": [row(64, name, f"mode {i}") for name in ("standard", "sdpa", "flash", "chunked") for i in range(5)],
    "many": [row(64 * 2**i, name, m) for i in range(20) for name in ("sdpa", "flash") for m in ("none", "selective")],
    "out of memory": [row(64), row(128), row(256, status="oom"), row(64, "flash", status="unavailable")],
}


@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_plots_of_several_trials(tmp_path, rows):
    assert plot_ablation(rows, tmp_path / "a.png", title="title", memory_of="process")
    assert plot_losses(rows, tmp_path / "b.png", title="title")
    for name in ("a.png", "b.png"):
        height, width, _ = matplotlib.image.imread(tmp_path / name).shape
        assert width > 600 and height > 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


@pytest.fixture
def figures(monkeypatch):
    """The figures that would be written."""
    kept = []
    monkeypatch.setattr(ablation_plot, "save_figure", lambda figure, *_, **__: kept.append(figure))
    return kept


def test_one_length_draws_a_bar_for_each_trial(figures):
    rows = [row(64), row(64, "standard", status="oom"), row(64, "flash", status="unavailable"), row(64, "auto")]
    rows[-1] = replace(rows[-1], ran="flash")
    plot_ablation(rows, "a.png", title="title")
    (figure,) = figures
    time, memory, loss = figure.axes
    assert [len(panel.patches) for panel in figure.axes] == [4, 4, 4]
    assert [text.get_text() for text in memory.texts] == [" 0.0625", " out of memory", " unavailable", " 0.0625"]
    assert [text.get_text() for text in loss.texts][0] == " 3"
    assert [label.get_text() for label in time.get_yticklabels()] == ["sdpa", "standard", "flash", "auto: flash"]
    assert figure.get_suptitle() == "title, seq_len=64"


@pytest.mark.parametrize(("memory_of", "fitted"), [("process", False), ("device", True)])
def test_no_exponent_for_the_memory_of_a_whole_process(figures, memory_of, fitted):
    plot_ablation([row(64), row(128), row(256)], "a.png", memory_of=memory_of)
    time, memory, _ = (panel.get_legend().get_texts()[0].get_text() for panel in figures[0].axes)
    assert "propto" in time and ("propto" in memory) == fitted


def test_no_exponent_through_two_points(figures):
    plot_ablation([row(64), row(128)], "a.png", memory_of="device")
    assert not any("propto" in panel.get_legend().get_texts()[0].get_text() for panel in figures[0].axes)


def spread(row, by, seconds=None):
    changed = {"step_spread": by} | ({} if seconds is None else {"step_seconds": seconds})
    return replace(row, measured={**row.measured, **changed})


def test_disturbed_trial_is_hollow_and_left_out_of_the_fit(figures):
    rows = [spread(row(n), 0.02) for n in (64, 128, 256)] + [spread(row(512), 0.3, seconds=1.0)]
    plot_ablation(rows, "a.png", title="title", memory_of="device")
    time, memory, _ = figures[0].axes
    assert "n^{2.00}" in time.get_legend().get_texts()[0].get_text()
    assert "n^{1.00}" in memory.get_legend().get_texts()[0].get_text()  # of all four
    (hollow,) = [line for line in time.lines if line.get_markerfacecolor() == "white"]
    assert list(hollow.get_xdata()) == [512] and list(hollow.get_ydata()) == [1.0]
    assert not [line for line in memory.lines if line.get_markerfacecolor() == "white"]
    assert "disturbed" in figures[0].get_suptitle()


def test_no_exponent_with_too_few_undisturbed_trials(figures):
    plot_ablation([spread(row(n), 0.3 if n > 128 else 0.0) for n in (64, 128, 256, 512)], "a.png", memory_of="device")
    assert "propto" not in figures[0].axes[0].get_legend().get_texts()[0].get_text()


def test_step_times_have_error_bars_of_their_spread(figures):
    plot_ablation([spread(row(64), 0.1, seconds=2.0), spread(row(128), 0.04, seconds=4.0)], "a.png")
    (lines,) = figures[0].axes[0].collections
    assert [list(ends[:, 1]) for ends in lines.get_segments()] == [
        [pytest.approx(1.9), pytest.approx(2.1)],
        [pytest.approx(3.92), pytest.approx(4.08)],
    ]
    assert "disturbed" not in figures[0].get_suptitle()


def test_bars_show_spread_and_disturbed_trials(figures):
    plot_ablation([spread(row(64), 0.05, 1.0), spread(row(64, "flash"), 0.5, 2.0)], "a.png", title="title")
    time, memory, _ = figures[0].axes
    assert [text.get_text() for text in time.texts] == [" 1, spread 5%", " 2, spread 50% †"]
    assert [bar.get_facecolor() == (1.0, 1.0, 1.0, 1.0) for bar in time.patches] == [False, True]
    assert [bar.get_facecolor() == (1.0, 1.0, 1.0, 1.0) for bar in memory.patches] == [False, False]


def test_several_seeds_are_drawn_as_one_point(figures):
    rows = [replace(row(n), axes={**row(n).axes, "seed": seed}) for seed in (0, 1, 2) for n in (64, 128)]
    plot_ablation(rows, "a.png")
    assert [list(line.get_xdata()) for line in figures[0].axes[0].lines] == [[64, 128]]


def test_plot_gives_the_number_of_validation_tokens(figures):
    rows = [row(64), row(128)]
    for each in rows:
        each.measured.update(val_loss=2.0, val_tokens=32768)
    plot_ablation(rows, "a.png")
    rows[0].measured["val_tokens"] = 256  # which no heading says of all
    plot_ablation(rows, "a.png")
    headings = [figure.axes[2].get_title(loc="left") for figure in figures]
    assert headings == ["validation loss on 32,768 tokens (nats per token)", "validation loss (nats per token)"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, math.inf, None, 0.0, -1.0])
@pytest.mark.parametrize("lengths", [(64,), (64, 128, 256)])
def test_plots_of_values_that_no_axis_can_show(tmp_path, figures, lengths, value):
    names = ("step_seconds", "step_spread", "peak_memory_gib", "train_loss", "val_loss")
    bad = [replace(row(n), measured=dict.fromkeys(names, value)) for n in lengths]
    if value is not None:
        bad = [replace(each, losses=dict.fromkeys(each.losses, value)) for each in bad]
    for rows in (bad, bad[:1] + [row(n, "flash") for n in lengths]):
        assert plot_ablation(rows, tmp_path / "a.png") and plot_losses(rows, tmp_path / "b.png")
    for figure in figures:
        figure.savefig(io.BytesIO())
    if len(lengths) > 1:
        assert [panel.texts[0].get_text() for panel in figures[0].axes] == ["no finite value"] * 3
        assert "(no finite value)" in figures[0].axes[0].get_legend().get_texts()[0].get_text()


def test_no_plot_without_a_finished_trial(tmp_path):
    assert not plot_ablation([row(64, status="oom")], tmp_path / "a.png")
    assert not plot_losses([row(64, status="oom")], tmp_path / "b.png")
    assert not list(tmp_path.iterdir())


def test_length_labels_do_not_overlap():
    assert _spaced_labels([1024]) == [1024]
    assert sorted(_spaced_labels([256, 512, 1024])) == [256, 512, 1024]
    shown = sorted(_spaced_labels([1024 * i for i in range(1, 21)]))
    assert shown[-1] == 20480 and len(shown) <= 10
    assert all(b / a > 1.3 for a, b in zip(shown, shown[1:], strict=False))
