"""Whether a saved optimizer trains the weights that an optimizer trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

ADVICE = "train the same weights (requires_grad), or begin a new run from the checkpoint's weights"


def check_same_weights(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse the state of other weights. A state belongs to a weight's number, which depends on who else is trained.

    Names are compared if both have them (``param_names``), else only how many weights there are in each group.

    Raises:
        ValueError: the state is of other weights, or of the same ones in another order.
    """
    saved, own = state_dict["param_groups"], optimizer.param_groups
    saved_names, own_names = _names(saved), _names(own)
    if saved_names and own_names and saved_names != own_names:
        only_there, only_here = (
            [name for name in some if name not in others]
            for some, others in ((saved_names, own_names), (own_names, saved_names))
        )
        found = [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} only {where}"
            for names, where in ((only_there, "in the checkpoint"), (only_here, "here"))
            if names
        ]
        raise ValueError(
            f"the optimizer of the checkpoint trains other weights: {'; '.join(found) or 'in another order'}; {ADVICE}"
        )
    if (there := _sizes(saved)) != (here := _sizes(own)):
        raise ValueError(
            f"the optimizer of the checkpoint has groups of {there} weights, and the one here of {here}; {ADVICE}"
        )


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group.get("param_names", ())]


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
