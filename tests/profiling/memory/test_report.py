import pytest

from flash_train.model import ModelConfig
from flash_train.profiling.memory.allocations import MemoryProfile
from flash_train.profiling.memory.plot import COLORS, ORDER, plot_memory, thinned
from flash_train.profiling.memory.prediction import KINDS, predict
from flash_train.profiling.memory.report import markdown, report
from flash_train.profiling.memory.step import Step

MODEL = ModelConfig(vocab_size=320, n_layers=2, width=64, n_heads=2, n_kv_heads=2, head_dim=32, mlp_width=128)


def as_measured(prediction):
    """A prediction as a profile, as if a step had done just that."""
    moments = [("forward" if phase == "loss" else phase, moment) for phase, moment in prediction.moments]
    phases = {
        phase: max((m for p, m in moments if p == phase), key=lambda m: m.total)
        for phase in ("forward", "backward", "step")
    }
    return MemoryProfile(prediction.peak, phases, {"blocks.0": prediction.per_layer}, moments)


def test_report_compares_prediction_and_measurement():
    step = Step(MODEL, 1024)
    prediction = predict(step)
    found = report(as_measured(prediction), prediction, step, allocated=prediction.peak_bytes, reserved=2**30)
    assert all(part["measured_bytes"] == part["predicted_bytes"] for part in found["parts"].values())
    assert found["fragmentation_bytes"] == 2**30 - prediction.peak_bytes
    text = markdown(found, "a title")
    assert "(+0.0%)" in text and "| mlp |" in text and "fragmentation" in text
    lines = text.splitlines()
    first = lines.index("## At the peak") + 2
    assert {line.count("|") for line in lines[first : first + 6]} == {4}


def test_every_kind_has_its_own_colour():
    assert set(ORDER) == set(KINDS) == set(COLORS) and len(set(COLORS.values())) == len(KINDS)


def test_thinning_keeps_the_peak_and_the_order_of_phases():
    moments = as_measured(predict(Step(ModelConfig(**(MODEL.to_dict() | {"n_layers": 200})), 1024))).moments
    few = thinned(moments)
    assert len(few) < 2000 < len(moments)
    assert max(m.total for _, m in few) == max(m.total for _, m in moments)
    assert list(dict.fromkeys(phase for phase, _ in few)) == ["forward", "backward", "step"]


def test_plot_of_a_single_length(tmp_path):
    moments = as_measured(predict(Step(MODEL, 1024))).moments
    path = plot_memory(tmp_path / "memory.png", moments, {"none": ([1024], [2**20])}, (1024, 2**20, "none"), "one")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("curves", [{}, {"none": ([], [])}, {"none": ([1024], [2**20])}])
def test_plot_of_a_step_without_allocations(tmp_path, curves):
    path = plot_memory(tmp_path / "memory.png", [], curves, (1024, 2**20, "none"), "none")
    assert path.stat().st_size > 5000
