"""The LightningModule: the computation of a training step and of a validation."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_train.attention import Packing, attended_pairs
from flash_train.attention.parallel import Method
from flash_train.checks import brief
from flash_train.distributed.context import own_part
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.model import ModelConfig, Transformer
from flash_train.optim import exact_weights, step_in_backward
from flash_train.training.batch import Batch, check_batch, document_layout, document_lengths, uses_own_kernels
from flash_train.training.evaluation_sums import EvaluationSums
from flash_train.training.optimizer import (
    OptimizerConfig,
    build_adamw,
    obstacle_to_step_in_backward,
    rescale_and_clip,
    warmup_cosine,
)
from flash_train.training.saved_model import check_same_model
from flash_train.training.step_graph import StepGraph
from flash_train.training.step_log import is_logged, log_at_step
from flash_train.training.step_result import StepResult
from flash_train.training.token_mean import TokenMean

# Entries of a checkpoint
PRETRAINED = "pretrained"  # the pretrained model that training began from, as `PretrainedSource.to_dict` describes it
PLANNED_STEPS = "planned_steps"  # optimizer steps of the whole learning-rate schedule

SHARDING = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


class CausalLMModule(pl.LightningModule):
    """Trains a causal language model on packed batches (see `flash_train.data` for their layout).

    The loss gives every labelled token the same weight, however tokens are spread over micro-batches and ranks (see
    `TokenMean`).

    Args:
        model: a built model, or the `ModelConfig` (or its dictionary) to build one from. A model that is not a
            `Transformer` needs `loss(tokens, labels, *, positions, packing) -> (sum, count)`. `Throughput` also needs
            `model_flops(n_tokens, pairs)`, and `compile` needs `blocks`. To load its checkpoint, build it first.
        optimizer: `OptimizerConfig`, or its dictionary; None takes its defaults.
        attention, memory: passed to the `Transformer` that a `ModelConfig` builds; a built `Transformer` has its own.
        compile: compile each transformer block by itself with `torch.compile`.
        val_bytes_per_token: bytes of text per labelled token of the validation part; logs bits per byte.
        answer_accuracy: also validate the share of labelled tokens that the model's first choice gets right.
        chance_level: the accuracy of guessing, logged next to `answer_accuracy`.

    Raises:
        TypeError: a model without `loss`.
        ValueError: an unknown backend of attention or memory mode, or `compile` for a model without `blocks`.
    """

    def __init__(
        self,
        model: nn.Module | ModelConfig | Mapping[str, Any],
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        *,
        attention: str = "auto",
        memory: str = "none",
        compile: bool = False,
        val_bytes_per_token: float | None = None,
        answer_accuracy: bool = False,
        chance_level: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(optimizer, OptimizerConfig):
            optimizer = OptimizerConfig.from_dict(optimizer or {})
        self.model = _build_model(model, attention, memory)
        if isinstance(self.model, Transformer):
            attention, memory = self.model.attention, self.model.memory
        self.attention = attention
        self.optimizer_config = optimizer
        self.val_bytes_per_token = val_bytes_per_token
        self.answer_accuracy = answer_accuracy
        self.chance_level = chance_level
        # Plain values only, so that a checkpoint loads with weights_only=True.
        self.save_hyperparameters(
            {
                "model": self._model_values(),
                "optimizer": optimizer.to_dict(),
                "attention": attention,
                "memory": memory,
                "compile": compile,
                "val_bytes_per_token": val_bytes_per_token,
                "answer_accuracy": answer_accuracy,
                "chance_level": chance_level,
            }
        )
        if compile:
            if not hasattr(self.model, "blocks"):
                raise ValueError(f"compile=True compiles the model's blocks, and {type(self.model).__name__} has none")
            for block in self.model.blocks:
                block.compile(dynamic=False)  # every batch has the same shapes

        self.seq_len: int | None = None  # of the newest batch
        self.last_step: StepResult | None = None
        self.validation: dict[str, float] = {}
        self.loaded_step: int | None = None
        self.skip_validation = False
        self.planned_steps: int | None = None
        self.pretrained: dict[str, Any] | None = None  # see PRETRAINED
        self.first_weights: Callable[[Any], None] = methodcaller("draw_weights")
        self.step_graph: StepGraph | None = None  # set by the callback `CudaGraph`
        self._is_replayed = False  # the newest micro-batch
        self._token_mean = TokenMean()
        self._finished: tuple[Tensor, Tensor] | None = None  # loss and norm of a step that the backward took
        self._forward_dtype = torch.get_default_dtype()

    @property
    def model_name(self) -> str:
        """The name in the model's configuration; for another kind of model, the name of its class."""
        config = getattr(self.model, "config", None)
        return config.name if isinstance(config, ModelConfig) else type(self.model).__name__

    def setup(self, stage: str) -> None:
        """Refuse what would fail later.

        - Rows that ranks share need a `Transformer`.
        - A time between validations needs one device: with Lightning each rank goes by its own clock.
        - A token id needs an embedding. On a GPU another id would fail an assertion inside a kernel.
        """
        if self._context_group is not None and not isinstance(self.model, Transformer):
            raise ValueError(
                f"context: ranks can share the rows of a Transformer, not of a {type(self.model).__name__}"
            )
        if self.trainer.world_size > 1 and getattr(self.trainer, "_val_check_time_interval", None) is not None:
            raise ValueError("val_check_interval: must be a number of batches on several devices, whose clocks differ")
        config = getattr(self.model, "config", None)
        needed = getattr(getattr(self.trainer, "datamodule", None), "vocab_size", None)
        if isinstance(config, ModelConfig) and needed is not None and needed > config.vocab_size:
            raise ValueError(f"vocab_size={config.vocab_size}: must be {needed} or more, the token ids of the data")

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Return the logits of the next token.

        Args:
            tokens: int64 (batch, seq_len).
            positions: int64 (batch, seq_len), from each document's start; None derives them.
            packing: the documents' boundaries in the rows; None makes one causal document of each row.
                `model_arguments` returns both arguments for a batch.

        Returns:
            (batch, seq_len, vocab_size), in the dtype that the model computes in.
        """
        return self.model(tokens, positions=positions, packing=packing)

    # -- training

    def initialize_weights(self) -> None:
        """Give the model its first weights. A strategy calls this once it has allocated weights on the meta device."""
        self.first_weights(self.model)

    def on_fit_start(self) -> None:
        self.seq_len, self.last_step, self.validation = None, None, {}  # of an earlier fit or validation

    def on_train_start(self) -> None:
        self._token_mean.begin()  # an earlier fit may have ended between the micro-batches of a step
        self._finished = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        check_batch(batch, "tokens", "labels")
        self._forward_dtype = torch.get_default_dtype()
        sums = None if self.step_graph is None else self.step_graph.run(batch)
        self._is_replayed = sums is not None
        if sums is None:
            batch, context = self.own_part(batch)
            self._token_mean.agree(batch["labels"].numel(), self.trainer, self.device)
            with self._adding_gradients():
                sums = self.model.loss(batch["tokens"], batch["labels"], **context)
        return self._token_mean.add(*sums)

    def loss_with_sums(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute what a `StepGraph` captures: the loss that `backward` gets, and the sums that it is made of."""
        with self._adding_gradients():
            loss_sum, n_tokens = self.model.loss(batch["tokens"], batch["labels"], **self.model_arguments(batch))
        loss = loss_sum / self._token_mean.divisor / self.trainer.accumulate_grad_batches
        return loss, (loss_sum, n_tokens)

    def _adding_gradients(self) -> AbstractContextManager[None]:
        """Accumulate a step's gradients inside the matrix products, on a single device (see `Transformer`)."""
        alone = isinstance(self.trainer.strategy, SingleDeviceStrategy) and self.trainer.accumulate_grad_batches > 1
        return self.model.adding_gradients() if alone and isinstance(self.model, Transformer) else nullcontext()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run Lightning's backward under the default dtype of the forward pass; a replay has already run it.

        Lightning's bf16-true changes the default dtype during the forward pass alone. Recomputation must find it
        unchanged: with torch 2.11, nested checkpoints raise otherwise.
        """
        if self._is_replayed and self.step_graph is not None:
            self.step_graph.give_gradients()
            return
        outside = torch.get_default_dtype()
        torch.set_default_dtype(self._forward_dtype)
        try:
            if self.optimizer_config.in_backward:
                self._step_in_backward(loss, *args, **kwargs)
            else:
                super().backward(loss, *args, **kwargs)
        finally:
            torch.set_default_dtype(outside)

    def _step_in_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a step's only micro-batch, which updates the weights."""
        mean, factor = self._token_mean.finish(self.trainer)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.grad_scale = factor.float().reciprocal()
        with step_in_backward(optimizer) as norms:
            super().backward(loss, *args, **kwargs)
        self._finished = mean, norms.total() * factor.float()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Run Lightning's step, then free the gradients.

        Lightning would keep them until the next backward, and the forward pass before it needs the memory.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Turn the accumulated gradients into the gradients of the token mean, and clip them by their norm.

        Called once per optimizer step, after any loss scale has been divided out. `Trainer(gradient_clip_val=...)`
        takes precedence over `OptimizerConfig.gradient_clip`.
        """
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm={gradient_clip_algorithm}: must be norm, or None")
        trainer = self.trainer
        if self._finished is not None:
            (loss, norm), self._finished = self._finished, None
        else:
            loss, factor = self._token_mean.finish(trainer)
            clip = self.optimizer_config.gradient_clip if gradient_clip_val is None else gradient_clip_val
            norm = rescale_and_clip(optimizer, factor, clip)
        learning_rate, rank_loss = optimizer.param_groups[0]["lr"], self._token_mean.rank_loss
        self.last_step = StepResult(trainer.global_step + 1, loss, norm, learning_rate, rank_loss)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(getattr(callback, "logs_steps", False) for callback in callbacks):
            metrics = {"train/loss": loss.float(), "train/gradient_norm": norm}
            self.log_dict(metrics, logger=False)
            if is_logged(trainer, self.last_step.step):
                log_at_step(trainer, {name: value.item() for name, value in metrics.items()}, self.last_step.step)

    def configure_optimizers(self) -> Any:
        strategy = self.trainer.strategy
        if isinstance(strategy, SHARDING) and not isinstance(strategy, ShardedStrategy):
            raise ValueError(f"strategy={type(strategy).__name__}: must be ShardedStrategy to shard the weights")
        config = self.optimizer_config
        max_steps: float = self.trainer.max_steps
        if max_steps < 0:
            max_steps = self.trainer.estimated_stepping_batches
        if not (math.isfinite(max_steps) and max_steps > 0):  # Lightning estimates infinity, or -1, for endless data
            raise ValueError("the learning-rate schedule needs an end: give Trainer(max_steps=...)")
        if config.in_backward and (obstacle := obstacle_to_step_in_backward(self.trainer)):
            raise ValueError(f"optimizer.in_backward=true: {obstacle}; allowed: false")
        optimizer = build_adamw(self.model, config)
        self.planned_steps = int(max_steps)
        scheduler = warmup_cosine(optimizer, config, self.planned_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- validation

    def on_validation_epoch_start(self) -> None:
        self._evaluation = EvaluationSums(self.device)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count a batch; several loaders are measured as one."""
        if self.skip_validation:
            self._evaluation.skip_batch()
            return
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        metrics = self._metrics("val")
        self.validation = {} if self.trainer.sanity_checking else metrics
        if not metrics:
            return
        fitting = self.trainer.state.fn == "fit"
        # These are already means over all ranks, which Lightning cannot know. During a fit they are logged below, at
        # the step of the weights. Outside of a fit Lightning returns what it logs.
        self.log_dict(metrics, logger=not fitting, sync_dist=True)
        if fitting and not self.trainer.sanity_checking:
            log_at_step(self.trainer, metrics, self.trainer.global_step)

    # -- test and prediction

    def on_test_epoch_start(self) -> None:
        self._evaluation = EvaluationSums(self.device)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Measure the same as validation, under `test/loss`, `test/bits_per_byte` and so on."""
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self._metrics("test"), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the logits of the next token: (batch, seq_len, vocab_size), as `forward` does for these documents.

        `Trainer.predict` keeps all of them, vocab_size numbers per token, unless `return_predictions=False`.
        """
        if self._context_group is not None:
            raise ValueError("predict: the logits of a row need a strategy with context=1")
        check_batch(batch, "tokens")
        return self(batch["tokens"], **self.model_arguments(batch))

    def _evaluate(self, batch: Batch) -> None:
        check_batch(batch, "tokens", "labels")
        batch, context = self.own_part(batch)
        self._evaluation.add(*self.model.loss(batch["tokens"], batch["labels"], **context))
        if self.answer_accuracy:
            self._evaluation.add_answers(self.model(batch["tokens"], **context), batch["labels"])

    def _metrics(self, part: str) -> dict[str, float]:
        return self._evaluation.metrics(
            self.trainer.strategy,
            part,
            bytes_per_token=self.val_bytes_per_token,
            answer_accuracy=self.answer_accuracy,
            chance_level=self.chance_level,
        )

    # -- batches

    @property
    def _context_group(self) -> tuple[ProcessGroup, Method] | None:
        """The ranks that share this rank's rows and how they divide attention; None if no others share them."""
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        group = getattr(strategy, "context_group", None)
        return None if group is None else (group, strategy.context_method)

    def own_part(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return this rank's tokens and labels of a batch, and the model's arguments `positions` and `packing`.

        They are the whole batch's unless several ranks share it, which the strategy's `context_group` says.
        """
        if self._context_group is None:
            return batch, self.model_arguments(batch)
        self.seq_len = batch["tokens"].shape[1]
        own, row = own_part(batch, document_lengths(batch), *self._context_group)
        return own, {"positions": own["positions"], "packing": row}

    def model_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the model's arguments `positions` and `packing` for a batch; packing is None for plain rows."""
        self.seq_len = batch["tokens"].shape[1]
        head_dim = getattr(getattr(self.model, "config", None), "head_dim", 1)
        own_kernels = uses_own_kernels(self.attention, batch["tokens"].device, head_dim)
        return document_layout(batch, on_device=own_kernels)

    def flops(self, batch: Batch) -> int:
        """Count the exact model FLOPs of one batch, forward and backward, on the host without synchronising."""
        return self.model.model_flops(batch["tokens"].numel(), attended_pairs(document_lengths(batch)))

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the schedule's length: the schedule is a closure, which a checkpoint cannot hold."""
        hyper_parameters = checkpoint.get("hyper_parameters", {})
        if hyper_parameters.get("model", {}) is None:  # LightningCLI would build the module with this argument
            del hyper_parameters["model"]
        checkpoint[PLANNED_STEPS] = self.planned_steps
        if self.pretrained is not None:
            checkpoint[PRETRAINED] = self.pretrained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model in one message; PyTorch would list every tensor.

        If the weights are fp32 here and were bf16 with an exact master, they get all bits of the master.
        """
        check_same_model(checkpoint.get("hyper_parameters", {}), self._model_values())
        optimizers = checkpoint.get("optimizer_states")
        if optimizers and all(weight.dtype == torch.float32 for weight in self.model.parameters()):
            checkpoint["state_dict"] = exact_weights(checkpoint["state_dict"], optimizers[0], "model.")
        self.loaded_step = checkpoint["global_step"]
        self.pretrained = checkpoint.get(PRETRAINED, self.pretrained)

    def _model_values(self) -> dict[str, Any] | None:
        """Return the model's configuration as plain values; None for a model without a `ModelConfig`."""
        config = getattr(self.model, "config", None)
        return config.to_dict() if isinstance(config, ModelConfig) else None


def _build_model(model: nn.Module | ModelConfig | Mapping[str, Any], attention: str, memory: str) -> Any:
    if isinstance(model, Mapping):
        model = ModelConfig.from_dict(dict(model))
    if isinstance(model, ModelConfig):
        return Transformer(model, attention=attention, memory=memory)
    if isinstance(model, type) or not callable(getattr(model, "loss", None)):
        kind = type(model).__name__ if isinstance(model, nn.Module) else brief(model)
        raise TypeError(
            f"model={kind}: must be a ModelConfig, its dictionary, or a module with "
            "loss(tokens, labels, *, positions, packing) -> (sum, count)"
        )
    return model
