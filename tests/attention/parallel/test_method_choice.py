"""The choice between fetching keys and exchanging heads."""

import pytest

from flash_train.attention.parallel.key_transfers import plan_transfers
from flash_train.attention.parallel.method_choice import Sizes, choose_method, costs
from flash_train.attention.parallel.row_plan import plan_row
from tests.support.attention.parallel.row_draws import DRAWS, draw

LLAMA = Sizes(heads=32, kv_heads=8, head_dim=128, v_head_dim=128, element_bytes=2)
MANY_KEYS = Sizes(heads=32, kv_heads=32, head_dim=128, v_head_dim=128, element_bytes=2)


def test_received_rows_are_those_of_the_transfers():
    for seed in DRAWS[::5]:
        lengths, seq_len, ranks, window = draw(seed)
        plan = plan_row(lengths, seq_len, ranks, window)
        assert plan.most_fetched == max(sum(plan_transfers(plan, rank).receive) for rank in range(ranks)), seed


@pytest.mark.parametrize(
    ("lengths", "ranks", "sizes", "method"),
    [
        ([131_072], 2, LLAMA, "gather"),  # few key heads, and half of the keys
        ([131_072], 16, MANY_KEYS, "ulysses"),  # almost all keys, or a sixteenth of four tensors
        ([16_384], 8, MANY_KEYS, "ulysses"),
        ([512] * 256, 8, MANY_KEYS, "gather"),  # no document is split
    ],
)
def test_the_method_that_sends_less_is_chosen(lengths, ranks, sizes, method):
    plan = plan_row(lengths, sum(lengths), ranks)
    found = costs(plan, sizes)
    assert min(found, key=lambda name: found[name].received) == method == choose_method(plan, sizes)


def test_bytes_are_counted_by_hand():
    found = costs(plan_row([4096], 4096, 4), Sizes(heads=8, kv_heads=4, head_dim=64, v_head_dim=32, element_bytes=2))
    # the rank with the last chunk of 8 sees all keys and holds 2 chunks of 512
    assert found["gather"].received == 3 * (4096 - 1024) * 4 * (64 + 32) * 2
    # of a rank's 1,024 tokens, 3 / 4 of each tensor comes from others
    assert found["ulysses"].received == 3 * 768 * (8 + 4) * (64 + 32) * 2


def test_heads_that_the_ranks_do_not_divide_leave_gather():
    plan = plan_row([4096], 4096, 4)
    assert list(costs(plan, Sizes(heads=6, kv_heads=2, head_dim=64, v_head_dim=64, element_bytes=2))) == ["gather"]
    assert list(costs(plan, Sizes(heads=12, kv_heads=6, head_dim=64, v_head_dim=64, element_bytes=2))) == ["gather"]


def test_more_groups_hide_more_of_the_exchange():
    """Eight key heads make eight groups of `gather`, but one of `ulysses` on eight ranks."""
    plan = plan_row([131_072], 131_072, 8)
    found = costs(plan, LLAMA)
    assert found["ulysses"].received < found["gather"].received
    assert choose_method(plan, LLAMA) == "gather"
