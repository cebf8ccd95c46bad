"""Range errors all have the same form."""

import math

import numpy as np
import pytest
import torch

from flash_train.checks import (
    POSITIVE,
    above,
    as_integer,
    at_least,
    brief,
    check,
    check_name,
    integer_at_least,
    one_of,
    within,
)


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "words"),
    [
        (at_least(2), [2, 2.5], [1, math.nan, "3", None], "2 or more"),
        (above(0), [1e-9], [0, -1, math.nan, "3e-4"], "more than 0"),
        (within(0, 1), [0, 1], [-0.1, 1.1, math.nan], "in [0, 1]"),
        (within(0, 1, "[)"), [0, 0.9], [-0.1, 1, math.nan], "in [0, 1)"),
        (within(0, 1, "()"), [0.1, 0.9], [0, 1, math.nan], "in (0, 1)"),
        (integer_at_least(1), [1, 8], [0, 1.0, True, "1"], "an integer of at least 1"),
        (POSITIVE, [1e-9, 5], [0, math.inf, math.nan], "positive and finite"),
        (one_of("a", "b"), ["a", "b"], ["c", None], "one of a, b"),
    ],
    ids=lambda x: getattr(x, "words", None),
)
def test_error_states_the_allowed_range(allowed, good, bad, words):
    for value in good:
        check("x", value, allowed)
    for value in bad:
        with pytest.raises(ValueError) as caught:
            check("x", value, allowed)
        assert str(caught.value) == f"x={value!r}: must be {words}"


def test_none_is_accepted_if_allowed():
    check("keep", None, at_least(1), or_none="or null to keep all")
    with pytest.raises(ValueError, match="^keep=0: must be 1 or more, or null to keep all$"):
        check("keep", 0, at_least(1), or_none="or null to keep all")


def test_unknown_name_lists_the_choices():
    check_name("memory", "none", {"none": 0})
    with pytest.raises(ValueError, match="^memory='some': must be one of none, full$"):
        check_name("memory", "some", {"none": 0, "full": 1})


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_integers_become_plain_ints(value):
    assert type(as_integer("n", value, 1)) is int and as_integer("n", value, 1) == 3
    assert as_integer("n", None, 1, or_none="or None for all") is None


@pytest.mark.parametrize("value", [2, 256.0, np.float64(256), True, np.bool_(True), "256", None], ids=repr)
def test_other_values_are_no_integers(value):
    with pytest.raises(ValueError) as caught:
        as_integer("n", value, 3)
    assert str(caught.value) == f"n={value!r}: must be an integer of at least 3"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 200, repr("a" * 200)),
        ([1, 2], "[1, 2]"),
        (list(range(100)), "list"),
        (dict, "dict"),
        (torch.zeros(3, 4), "Tensor of shape (3, 4)"),
        (np.zeros((3, 4)), "ndarray of shape (3, 4)"),
        (torch.tensor(True), "tensor(True)"),
        (torch.nn.Sequential(torch.nn.ReLU()), "Sequential"),
    ],
)
def test_a_value_in_an_error_is_one_line(value, text):
    assert brief(value) == text
