"""The measurements of a validation or a test: sums over its batches, and the metrics of all ranks."""

import math

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from flash_train.training.token_mean import sum_dtype


class EvaluationSums:
    """Sums over the batches of one validation or test on this rank."""

    def __init__(self, device: torch.device) -> None:
        # loss, labelled tokens, right answers, skipped batches
        self._sums = torch.zeros(4, dtype=sum_dtype(device), device=device)

    def add(self, loss_sum: Tensor, n_tokens: Tensor) -> None:
        """Count a batch: its loss in nats, summed over its labelled tokens, and the number of labelled tokens."""
        self._sums[0] += loss_sum
        self._sums[1] += n_tokens

    def add_answers(self, logits: Tensor, labels: Tensor) -> None:
        """Count the labels that the largest logit gets right: logits (batch, seq_len, vocab), labels (batch, seq_len).

        A position without a label has -100, which is not a token id, so it never counts as right.
        """
        self._sums[2] += (logits.argmax(-1) == labels).sum()

    def skip_batch(self) -> None:
        """Count a batch that was not evaluated; `metrics` is then empty."""
        self._sums[3] += 1

    def metrics(
        self,
        strategy: Strategy,
        part: str,
        *,
        bytes_per_token: float | None,
        answer_accuracy: bool,
        chance_level: float | None,
    ) -> dict[str, float]:
        """Return metrics over all ranks, named `val/loss` for the part "val"; all ranks call it together.

        Empty if a rank skipped a batch or if no token has a label.
        """
        loss_sum, n_tokens, n_right, n_skipped = strategy.reduce(self._sums, reduce_op="sum").tolist()
        if n_skipped or not n_tokens:
            return {}
        loss = loss_sum / n_tokens
        metrics = {f"{part}/loss": loss}
        if bytes_per_token:
            metrics[f"{part}/bits_per_byte"] = loss / math.log(2) / bytes_per_token
        if answer_accuracy:
            metrics[f"{part}/answer_accuracy"] = n_right / n_tokens
            if chance_level is not None:
                metrics[f"{part}/chance_level"] = chance_level
        return metrics
