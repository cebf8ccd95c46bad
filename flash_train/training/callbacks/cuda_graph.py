"""Runs the micro-batches of a training by CUDA graphs, where they can be captured."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from flash_train.checks import AUTO_OR_BOOL, check
from flash_train.model import Transformer
from flash_train.training.batch import uses_own_kernels
from flash_train.training.callbacks.base import find_callback
from flash_train.training.callbacks.memory_snapshot import MemorySnapshot
from flash_train.training.callbacks.step_times import StepTimes, has_compiled_blocks
from flash_train.training.step_graph import StepGraph

#: tokens of a micro-batch up to which `auto` captures it; longer ones keep a GPU busy, and the graph only takes memory
MOST_TOKENS = 65_536


class CudaGraph(Callback):
    """Captures the forward and backward of a `CausalLMModule` (see `flash_train.training.step_graph`).

    The first two micro-batches run without a graph, so a run starts no later. Weights, losses and random numbers have
    the same bits as in a run without graphs. The memory of a micro-batch stays reserved between steps.

    Args:
        mode: True, False, or `auto`: where it is possible and a micro-batch has at most 65,536 tokens.

    Raises:
        ValueError: the mode is none of these; or, at the start of training, what prevents True.
    """

    def __init__(self, mode: bool | str = "auto") -> None:
        check("cuda_graph", mode, AUTO_OR_BOOL)
        self.mode = mode

    def obstacle(self, trainer: Trainer, pl_module: Any, tokens: int, *, one_document_rows: bool = False) -> str | None:
        """Return what prevents a capture of micro-batches with so many tokens, or None.

        Args:
            one_document_rows: whether each row is one document, as `data.packing=concat` makes it.
        """
        if self.mode is False:
            return "it is false"
        model, device = getattr(pl_module, "model", None), trainer.strategy.root_device
        if device.type != "cuda":
            return "there is no NVIDIA GPU"
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            return "several devices exchange tensors within a step"
        if not isinstance(model, Transformer):
            return f"{type(model).__name__} is no Transformer of flash_train"
        if own := _changed_methods(pl_module):
            return f"{type(pl_module).__name__} has a {own} of its own, which a replay would leave out"
        if name := _hooked(pl_module):
            return f"{name} has hooks, which a replay would not call"
        if find_callback(trainer, GradientAccumulationScheduler):
            return "GradientAccumulationScheduler changes the number of micro-batches in a step"
        if _reads_lengths(model, device) and not one_document_rows:
            return (
                f"attention={model.attention} needs the lengths of a batch's documents, which data.packing=concat fixes"
            )
        if model.attention == "chunked" and model.config.attention_dropout > 0:
            return "attention=chunked with dropout reads the generator's state within a step"
        if has_compiled_blocks(pl_module):
            return "compiled layers have launches of their own"
        if pl_module.optimizer_config.in_backward:
            return "optimizer.in_backward updates weights within the backward"
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return "fp16-mixed changes the scale of the loss"
        if find_callback(trainer, StepTimes) or find_callback(trainer, MemorySnapshot):
            return "callbacks that look into a step (step_times, memory_snapshot) need its launches one by one"
        if model.offload > 0:
            return "memory.offload copies to the host within a step"
        random = max(model.config.attention_dropout, model.config.residual_dropout) > 0
        if random and model.memory != "none":
            return f"memory={model.memory} with dropout reads the generator's state within a step"
        if self.mode == "auto" and tokens > MOST_TOKENS:
            return f"{tokens:,} tokens keep the GPU busy without"
        return None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        data = getattr(trainer, "datamodule", None)
        tokens = getattr(data, "batch_size", 0) * getattr(data, "seq_len", 0)
        one_document_rows = getattr(data, "packing", None) == "concat"
        obstacle = self.obstacle(trainer, pl_module, tokens, one_document_rows=one_document_rows)
        if obstacle and self.mode is True:
            raise ValueError(f"cuda_graph=true: {obstacle}; allowed: auto or false")
        if obstacle is None:
            pl_module.step_graph = StepGraph(
                pl_module.loss_with_sums,
                [*pl_module.parameters()],
                by_lengths=_reads_lengths(pl_module.model, trainer.strategy.root_device),
                settings=partial(captured_settings, trainer, pl_module),
                required=self.mode is True,
            )

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._release(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._release(pl_module)

    @staticmethod
    def _release(pl_module: Any) -> None:
        if graph := getattr(pl_module, "step_graph", None):
            graph.release()
            pl_module.step_graph = None


def captured_settings(trainer: Trainer, pl_module: Any) -> tuple[int, list[bool]]:
    """Return what a graph takes as it is at its capture: micro-batches in a step, and the mode of each module."""
    return trainer.accumulate_grad_batches, [module.training for module in pl_module.modules()]


def _reads_lengths(model: Transformer, device: torch.device) -> bool:
    """Whether the host must know the documents' lengths to launch the attention."""
    return not uses_own_kernels(model.attention, device, model.config.head_dim)


def _changed_methods(pl_module: Any) -> str | None:
    """Return which of the methods that a replay stands for a subclass of `CausalLMModule` has replaced, or None."""
    from flash_train.training.module import CausalLMModule

    names = ("training_step", "backward", "loss_with_sums", "model_arguments")
    changed = [name for name in names if getattr(type(pl_module), name, None) is not getattr(CausalLMModule, name)]
    return " and ".join(changed) or None


def _hooked(pl_module: Any) -> str | None:
    """Return the name of a weight or module with hooks on its forward or gradient, such as W&B's `watch` adds."""
    for name, weight in pl_module.named_parameters():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return str(name)
    for name, module in pl_module.named_modules():
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(module, kind) for kind in hooks):
            return name or type(module).__name__
    return None
