"""Errors of models in a precision: the largest over several models, since a single one may be small by chance."""

import copy

import torch

MODELS = 5


def redrawn(model, number):
    """A copy whose parameters have the same numbers in another order; number 0 is the model itself."""
    found = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(number)
    for parameter in found.parameters() if number else ():
        flat = parameter.data.flatten()
        parameter.data.copy_(flat[torch.randperm(len(flat), generator=draw)].view_as(parameter))
    return found


def assert_within(found, model, run, dtype):
    """The rule: an error is at most twice (gradients and weights: three times) PyTorch's, plus rounding.

    Args:
        found: tensors to compare; the first is the output, the others are gradients or trained weights.
        run: returns the same tensors for a model and a dtype.
    """
    exact, allowed = run(redrawn(model, 0), torch.float64), [0.0] * len(found)
    assert len(found) == len(exact)
    for number in range(MODELS):
        other = redrawn(model, number)
        errors = _errors(run(other, dtype), exact if number == 0 else run(other, torch.float64))
        allowed = [max(pair) for pair in zip(allowed, errors, strict=True)]
        rounding = [2 * torch.finfo(dtype).eps * float(x.abs().max()) for x in exact]
        limits = [(3 if i else 2) * a + r for i, (a, r) in enumerate(zip(allowed, rounding, strict=True))]
        ours = _errors(found, exact)
        if all(error <= limit for error, limit in zip(ours, limits, strict=True)):
            return
    raise AssertionError(f"errors {ours} exceed the limits {limits}")


def _errors(found, exact):
    return [float((x.double() - y.double()).abs().max()) for x, y in zip(found, exact, strict=True)]
