"""Launch options: changed for a block of code, and part of the key of a prepared call."""

import threading

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")

from flash_train.attention import AttentionSpec, Causal
from flash_train.attention.functional import operands_of
from flash_train.attention.kernels import launch_cache
from flash_train.attention.kernels.call import Call
from flash_train.attention.kernels.hopper import grid, tiles
from flash_train.attention.kernels.launch_options import LaunchOptions, launch_options, present_options
from tests.support.attention.on_cuda import OnCuda


def test_options_are_restored_after_an_error():
    with pytest.raises(KeyError), launch_options(processors=3, long_walk=0) as options:
        assert present_options() is options and options == LaunchOptions(processors=3, long_walk=0)
        raise KeyError
    assert present_options() == LaunchOptions()


def test_nested_options_keep_the_outer_ones():
    with launch_options(processors=3, heads_per_group=2):
        with launch_options(heads_per_group=None, cached_plans=7):
            assert present_options() == LaunchOptions(processors=3, cached_plans=7)
        assert present_options() == LaunchOptions(processors=3, heads_per_group=2)
    assert present_options() == LaunchOptions()


def test_other_threads_have_the_same_options():
    found = []
    with launch_options(processors=3):
        thread = threading.Thread(target=lambda: found.append(present_options()))
        thread.start()
        thread.join()
    assert found == [LaunchOptions(processors=3)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tile": 3}, "launch_options='tile': must be one of processors, heads_per_group, long_walk, cached_plans"),
        ({"processors": 0}, "processors=0: must be an integer of at least 1, or None for the device's own"),
        ({"heads_per_group": -1}, "heads_per_group=-1: must be an integer of at least 1, or None for as many as fit"),
        ({"long_walk": None}, "long_walk=None: must be an integer of at least 0"),
        ({"cached_plans": 0.5}, "cached_plans=0.5: must be an integer of at least 0"),
    ],
)
def test_wrong_options_are_refused(changes, message):
    with pytest.raises(ValueError) as raised, launch_options(**changes):
        pass
    assert str(raised.value) == message
    assert present_options() == LaunchOptions()


X = torch.empty(2, 300, 4, 64)
CALL = Call(*operands_of(X, X, AttentionSpec(Causal()), None, None, (0, 0, 0, 0), None, None))


def test_options_change_grids_and_tiles():
    q, k = (torch.empty(2, 300, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 4))
    with launch_options(processors=7):
        assert grid.processors(q.device) == 7
    for chosen, expected in ((1, 1), (3, 3), (100, 8)):  # there are 8 key heads
        with launch_options(heads_per_group=chosen):
            assert grid.kv_heads_at_once(q, k, CALL, 128) == expected
            assert grid.heads_at_once(q, k, CALL, 128) == 2 * expected
    short = tiles.forward_tile(64, 300, CALL)
    with launch_options(long_walk=150):  # causal: half of the keys
        assert tiles.forward_tile(64, 300, CALL) == tiles.LONG != short


@pytest.fixture
def prepare():
    """Launches a call, which is always the same, and returns whether it was prepared for this."""
    launch_cache.clear_plans()
    prepared = []

    def build(q, call):
        prepared.append(q)
        return ()

    def launch():
        before = len(prepared)
        launch_cache.launch_all(build, (OnCuda(),), (), CALL)
        return len(prepared) > before

    yield launch
    launch_cache.clear_plans()


@pytest.mark.parametrize("changes", [{"processors": 3}, {"heads_per_group": 3}, {"long_walk": 3}], ids=str)
def test_a_plan_is_for_the_options_that_it_was_made_with(changes, prepare):
    assert prepare() and not prepare()
    with launch_options(**changes):
        assert prepare() and not prepare()
    assert not prepare()


def test_size_of_the_cache_changes_no_plan(prepare):
    assert prepare()
    with launch_options(cached_plans=7):
        assert not prepare()


def test_without_cached_plans_every_call_is_prepared(prepare):
    with launch_options(cached_plans=0):
        assert prepare() and prepare()
    assert prepare() and not prepare()
    with launch_options(cached_plans=0):
        assert prepare()
