"""The LightningModule: what one training step and one validation pass compute."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from flash_train.attention import Packing, attended_pairs
from flash_train.attention.backends import OWN, flash_unavailable
from flash_train.model import ModelConfig, Transformer
from flash_train.training.optimizer import OptimizerConfig, build_adamw, rescale_and_clip, warmup_cosine
from flash_train.training.step_log import is_logged, log_at_step

Batch = dict[str, Any]

PRETRAINED = "pretrained"  # a checkpoint's entry: what the model that training began from says beyond its weights
PLANNED_STEPS = "planned_steps"  # a checkpoint's entry: the optimizer steps of the whole schedule

SHARDING = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)

# Settings that may change between a checkpoint and the model that loads it: they change how it trains, not what it is.
FREE_FIELDS = frozenset({"name", "attention_dropout", "residual_dropout"})


@dataclass(frozen=True)
class StepResult:
    """What the newest optimizer step did. Tensors are scalars on the training device, not yet synchronised.

    Args:
        step: optimizer steps taken, this one included.
        loss: float64 (fp32 on MPS), nats per labelled token over the step's micro-batches on all ranks.
        gradient_norm: fp32, of the gradient of that loss, before clipping.
        learning_rate: that this step used.
    """

    step: int
    loss: Tensor
    gradient_norm: Tensor
    learning_rate: float


class CausalLMModule(pl.LightningModule):
    """Trains a causal language model on packed batches (see `flash_train.data` for their layout).

    The loss weighs every labelled token alike, however they are spread over micro-batches and ranks: `training_step`
    returns the sum over tokens divided by a constant, and once per optimizer step the gradients are multiplied by
    that constant over the step's true token count.

    Args:
        model: a built model, or the `ModelConfig` (or its dictionary) to build one from. A model of one's own needs
            `loss(tokens, labels, *, positions, packing) -> (sum, count)`, for `Throughput` `model_flops(n_tokens,
            pairs)`, and for `compile` its `blocks`; to load its checkpoint, build it first.
        optimizer: `OptimizerConfig`, or its dictionary; None takes its defaults.
        attention, memory: passed to `Transformer` where a `ModelConfig` was given; a built `Transformer` has its own.
        compile: compile each transformer block by itself with `torch.compile`.
        val_bytes_per_token: bytes of text per labelled token of the validation part; logs bits per byte.
        answer_accuracy: also validate the share of labelled tokens that the model's first choice gets right.
        chance_level: what guessing would reach there; logged beside it.
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
        self.model = _built(model, attention, memory)
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
                "model": self._shape(),
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
        self.pretrained: dict[str, Any] | None = None  # of the model that training began from, by `PretrainedSource`
        self._sums: Tensor | None = None
        self._nominal = 0
        self._forward_dtype = torch.get_default_dtype()

    @property
    def model_name(self) -> str:
        """That of its configuration; of a model of one's own, its class's."""
        config = getattr(self.model, "config", None)
        return config.name if isinstance(config, ModelConfig) else type(self.model).__name__

    def setup(self, stage: str) -> None:
        """Refuse tokens that the model has no embedding for, which a GPU would tell by a failed assertion."""
        config = getattr(self.model, "config", None)
        found = getattr(getattr(self.trainer, "datamodule", None), "vocab_size", None)
        if isinstance(config, ModelConfig) and found is not None and found > config.vocab_size:
            raise ValueError(f"vocab_size={config.vocab_size}: the data have {found} tokens; allowed: that or more")

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: int64 (batch, seq_len).
            positions: int64 (batch, seq_len), from each document's start; None derives them.
            packing: where documents lie in the batch's rows; None makes one causal document of each row. `context`
                makes both of a batch.

        Returns:
            (batch, seq_len, vocab_size), in the dtype that the model computes in.
        """
        return self.model(tokens, positions=positions, packing=packing)

    # -- training

    def on_train_start(self) -> None:
        self._sums, self._nominal = None, 0  # an earlier fit may have ended amid the batches of a step

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._forward_dtype = torch.get_default_dtype()
        loss_sum, n_tokens = self.model.loss(batch["tokens"], batch["labels"], **self.context(batch))
        sums = torch.stack([loss_sum.detach().to(self._sum_dtype), n_tokens.to(self._sum_dtype)])
        self._sums = sums if self._sums is None else self._sums + sums
        # Any constant would do, as it is divided out again; this one keeps an fp16 loss near its mean.
        self._nominal = self._nominal or batch["labels"].numel()
        return loss_sum / self._nominal

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Under the forward's default dtype, which what is computed again must find as it was.

        Lightning's bf16-true changes it for the forward alone, and torch 2.11 then refuses one checkpoint in another.
        """
        outside = torch.get_default_dtype()
        torch.set_default_dtype(self._forward_dtype)
        try:
            super().backward(loss, *args, **kwargs)
        finally:
            torch.set_default_dtype(outside)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Lightning's, which keeps the gradients up to the next backward; a forward has better use for their memory."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Turn the accumulated gradients into those of the token mean, and clip them by their norm.

        Called once per optimizer step, after any loss scale has been divided out. `Trainer(gradient_clip_val=...)`,
        where given, takes the place of `OptimizerConfig.gradient_clip`.
        """
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"{gradient_clip_algorithm} does not apply: gradients are clipped by their norm")
        trainer = self.trainer
        loss_sum, n_tokens = trainer.strategy.reduce(self._sums, reduce_op="sum").unbind()
        n_tokens = n_tokens.clamp(min=1)  # a step without any label has loss 0 and gradient 0
        # Lightning divided the loss by the number of micro-batches, and averaged the gradients over the ranks.
        scale = self._nominal * trainer.accumulate_grad_batches * trainer.world_size / n_tokens
        clip = self.optimizer_config.gradient_clip if gradient_clip_val is None else gradient_clip_val
        norm = rescale_and_clip(optimizer, scale, clip)
        self.last_step = StepResult(trainer.global_step + 1, loss_sum / n_tokens, norm, optimizer.param_groups[0]["lr"])
        self._sums, self._nominal = None, 0
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(getattr(callback, "logs_steps", False) for callback in callbacks):
            metrics = {"train/loss": self.last_step.loss.float(), "train/gradient_norm": norm}
            self.log_dict(metrics, logger=False)
            if is_logged(trainer, self.last_step.step):
                log_at_step(trainer, {name: value.item() for name, value in metrics.items()}, self.last_step.step)

    def configure_optimizers(self) -> Any:
        if isinstance(self.trainer.strategy, SHARDING):
            name = type(self.trainer.strategy).__name__
            raise ValueError(f"{name} shards the weights, and gradients are clipped by the norm of whole ones: use ddp")
        config = self.optimizer_config
        max_steps: float = self.trainer.max_steps
        if max_steps < 0:
            max_steps = self.trainer.estimated_stepping_batches
        if not (math.isfinite(max_steps) and max_steps > 0):  # Lightning's estimate of no end is infinite, or -1
            raise ValueError("the learning-rate schedule needs an end: give Trainer(max_steps=...)")
        optimizer = build_adamw(self.model, config)
        self.planned_steps = int(max_steps)
        scheduler = warmup_cosine(optimizer, config, self.planned_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- validation

    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.skip_validation:
            self._evaluation_sums[3] += 1
            return
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self.validation = self._evaluated("val")
        if not self.validation:
            return
        fitting = self.trainer.state.fn == "fit"
        # They hold all ranks' values, which Lightning can't know. In a fit, the loggers have them at the step of the
        # weights; else Lightning returns what it logs.
        self.log_dict(self.validation, logger=not fitting, sync_dist=True)
        if fitting and not self.trainer.sanity_checking:
            log_at_step(self.trainer, self.validation, self.trainer.global_step)

    # -- test and prediction

    def on_test_epoch_start(self) -> None:
        self._begin_evaluation()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """What validation measures, under `test/loss`, `test/bits_per_byte` and so on."""
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self._evaluated("test"), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Logits of the next token: (batch, seq_len, vocab_size), as `forward` returns them for the batch's documents.

        `Trainer.predict` keeps all of them, vocab_size numbers a token, unless `return_predictions=False`.
        """
        return self(batch["tokens"], **self.context(batch))

    # -- what validation and test share

    def _begin_evaluation(self) -> None:
        # Sums of: loss, labelled tokens, right answers, batches left out.
        self._evaluation_sums = torch.zeros(4, dtype=self._sum_dtype, device=self.device)

    def _evaluate(self, batch: Batch) -> None:
        context = self.context(batch)
        loss_sum, n_tokens = self.model.loss(batch["tokens"], batch["labels"], **context)
        self._evaluation_sums[0] += loss_sum
        self._evaluation_sums[1] += n_tokens
        if self.answer_accuracy:
            choices = self.model(batch["tokens"], **context).argmax(-1)
            # -100 marks the unlabelled; no choice is negative, so that they never count as right.
            self._evaluation_sums[2] += (choices == batch["labels"]).sum()

    def _evaluated(self, part: str) -> dict[str, float]:
        """Metrics of all ranks' batches, named `val/loss` or `test/loss`; nothing where a batch was left out."""
        loss_sum, n_tokens, right, left_out = self.trainer.strategy.reduce(
            self._evaluation_sums, reduce_op="sum"
        ).tolist()
        if left_out or not n_tokens:
            return {}
        loss = loss_sum / n_tokens
        metrics = {f"{part}/loss": loss}
        if self.val_bytes_per_token:
            metrics[f"{part}/bits_per_byte"] = loss / math.log(2) / self.val_bytes_per_token
        if self.answer_accuracy:
            metrics[f"{part}/answer_accuracy"] = right / n_tokens
            if self.chance_level is not None:
                metrics[f"{part}/chance_level"] = self.chance_level
        return metrics

    @property
    def _sum_dtype(self) -> torch.dtype:
        """float64, in which a million tokens' losses add up without loss; MPS has none."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    # -- batches

    def context(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments that tell the model where documents lie: positions and packing (none for plain rows)."""
        self.seq_len = batch["tokens"].shape[1]
        if "cu_seqlens" not in batch:
            return {"positions": batch.get("positions"), "packing": None}
        cu_seqlens = batch["cu_seqlens"]
        # Numbers on the host would make torch.compile specialise on every batch; the kernels need none.
        lengths = None if self._kernels_run(cu_seqlens.device) else batch["lengths"]
        return {"positions": batch["positions"], "packing": Packing(cu_seqlens, cu_seqlens, lengths=lengths)}

    def _kernels_run(self, device: torch.device) -> bool:
        """Whether attention is this project's kernels, as asked or as `auto` finds."""
        if self.attention != "auto":
            return self.attention in OWN
        head_dim = getattr(getattr(self.model, "config", None), "head_dim", 1)
        return flash_unavailable(device, torch.float16, head_dim) is None

    def flops(self, batch: Batch) -> int:
        """Exact model FLOPs, forward and backward, of one packed batch; from host numbers only."""
        batch_size, seq_len = batch["tokens"].shape
        lengths = batch.get("lengths", (seq_len,) * batch_size)
        return self.model.model_flops(batch_size * seq_len, attended_pairs(lengths))

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say how long the schedule is: of itself it is a function, which no checkpoint keeps."""
        checkpoint[PLANNED_STEPS] = self.planned_steps
        if self.pretrained is not None:
            checkpoint[PRETRAINED] = self.pretrained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model in words, before PyTorch does so tensor by tensor."""
        hyper_parameters = checkpoint.get("hyper_parameters", {})
        if "model" not in hyper_parameters:
            raise ValueError("this checkpoint does not describe its model: it was not written by CausalLMModule")
        saved, own = hyper_parameters["model"] or {}, self._shape() or {}
        if not isinstance(saved, Mapping):  # `load_from_checkpoint` was given a model, and puts it in its place
            saved = own
        elif saved and own:  # what a checkpoint of an earlier version does not name has its default
            saved = ModelConfig.from_dict(dict(saved)).to_dict()
        differing = [name for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]
        if differing := [name for name in differing if name not in FREE_FIELDS]:
            fields = ", ".join(f"{name} ({saved.get(name)} saved, {own.get(name)} here)" for name in differing)
            raise ValueError(f"the checkpoint is of another model: {fields}")
        self.loaded_step = checkpoint["global_step"]
        self.pretrained = checkpoint.get(PRETRAINED, self.pretrained)

    def _shape(self) -> dict[str, Any] | None:
        """As kept in a checkpoint; None of a model that is not described by a `ModelConfig`."""
        config = getattr(self.model, "config", None)
        return config.to_dict() if isinstance(config, ModelConfig) else None


def _built(model: nn.Module | ModelConfig | Mapping[str, Any], attention: str, memory: str) -> Any:
    if isinstance(model, Mapping):
        model = ModelConfig.from_dict(dict(model))
    return Transformer(model, attention=attention, memory=memory) if isinstance(model, ModelConfig) else model
