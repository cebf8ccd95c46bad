"""Builds the objects of a run from its configuration. Every mistake of the user's that is left is found here."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from flash_train.attention.kernels.families import is_own
from flash_train.cli.components.data import build_data, data_notes, deal_rows
from flash_train.cli.components.loggers import build_logger
from flash_train.cli.components.model_config import build_model_config, choose_attention, device_of, plain
from flash_train.cli.components.module import init_module, load_init
from flash_train.cli.components.rotary import rotary_note
from flash_train.cli.components.trainer import build_run_trainer
from flash_train.cli.config.errors import UnavailableError, UsageError
from flash_train.cli.config.parallel import ParallelPlan, parallel_plan
from flash_train.cli.memory.choice import shortage_for_graph
from flash_train.cli.run.resume import check_resume, find_checkpoint
from flash_train.data import PackedDataModule
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import GIB, bytes_in_words
from flash_train.training import CausalLMModule, CudaGraph, RunRecord
from flash_train.training.callbacks.base import find_callback


@dataclass(frozen=True)
class Run:
    """The objects of a run.

    Args:
        checkpoint: the checkpoint that it resumes from, or None.
        attention: the backend that runs, and the reason for this choice.
        plan: how the devices divide the work.
        notes: what else the user should know, by topic; None if there is nothing to say on a topic.
    """

    trainer: lightning.Trainer
    module: CausalLMModule
    data: PackedDataModule
    logger: Logger | None
    checkpoint: Path | None
    attention: tuple[str, str]
    plan: ParallelPlan
    notes: dict[str, str | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.trainer.strategy.root_device


def build(config: DictConfig, run_dir: Path, plan: ParallelPlan | None = None, step: Step | None = None) -> Run:
    """Build the objects of a run.

    Args:
        plan: how several devices divide the work; None takes the configuration's.
        step: a training step with the chosen `keep` and `offload`, for the model to use; None: the model's defaults.

    Raises:
        UsageError: one line that names the key at fault.
    """
    device = device_of(config.trainer.accelerator)
    if (every := config.callbacks.kernel_times.every) and device.type != "cuda":
        raise UnavailableError(
            f"callbacks.kernel_times.every={every}: times the kernels of an NVIDIA GPU, and this run is on "
            f"{device.type}; allowed: null"
        )
    checkpoint = find_checkpoint(config, run_dir)
    pretrained = load_init(config)
    data = build_data(config)
    model = build_model_config(config, data.vocab_size, pretrained[0] if pretrained else None)
    backend, reason = choose_attention(config, device, model.head_dim)
    if config.compile and not is_own(backend) and config.data.packing != "concat":
        raise UsageError(
            f"compile=true: with attention={backend} every packing of documents is compiled separately; "
            "allowed: data.packing=concat, or attention=flash where it runs"
        )
    plan = plan or parallel_plan(config)
    trainer = build_run_trainer(config, run_dir, data, plan)
    lightning.seed_everything(config.seed, verbose=False)
    module = init_module(config, model, backend, data, pretrained, trainer)
    if step is not None:
        module.model.keep, module.model.offload = step.keep, step.offload
    deal_rows(data, module.model, plan)
    notes = data_notes(data, plan) | {"model": rotary_note(config, model)}
    if step is not None:
        step, notes["cuda_graph"] = decide_graph(config, step, trainer, module)
        record = find_callback(trainer, RunRecord)
        if record is not None and not config.compile:
            record.extra["predicted_memory_gib"] = predict(step).peak_bytes / GIB
    if checkpoint:
        notes |= check_resume(checkpoint, config, module, run_dir)
    # The logger comes last because it writes to run_dir: a run that cannot begin leaves nothing there. A validation
    # has none: W&B would add to the run whose checkpoint it measures.
    logger = None if config.validate_only else build_logger(config.logger, run_dir, plain(config))
    trainer.logger = logger
    return Run(trainer, module, data, logger, checkpoint, (backend, reason), plan, notes)


def decide_graph(
    config: DictConfig, step: Step, trainer: lightning.Trainer, module: CausalLMModule
) -> tuple[Step, str | None]:
    """The step, captured or not, and what the user should know of `trainer.cuda_graph`.

    If `auto` finds an obstacle, nothing will be captured.

    Raises:
        UnavailableError: there is no NVIDIA GPU, which `true` needs.
        UsageError: what else prevents `true`.
    """
    graph, on_cuda = find_callback(trainer, CudaGraph), trainer.strategy.root_device.type == "cuda"
    if graph is None or graph.mode is False or (graph.mode == "auto" and not on_cuda):
        return step, None  # on a CPU nobody expects a graph of `auto`
    one_document_rows = config.data.packing == "concat"
    obstacle = graph.obstacle(trainer, module, step.row_tokens, one_document_rows=one_document_rows)
    if config.callbacks.memory_snapshot.every:
        obstacle = obstacle or "callbacks.memory_snapshot needs the launches of a step one by one"
    if graph.mode == "auto":
        obstacle = obstacle or shortage_for_graph(config, step, trainer.strategy.root_device)
    if obstacle is None:
        captured = replace(step, captured=True)
        more = predict(captured).peak_bytes - predict(replace(step, captured=False)).peak_bytes
        note = "the launches of a micro-batch are captured after the second one, and replayed"
        return captured, f"{note}, for {bytes_in_words(more)} of memory"
    if graph.mode is True:
        kind = UsageError if on_cuda else UnavailableError
        raise kind(f"trainer.cuda_graph=true: {obstacle}; allowed: auto or false")
    graph.mode = False
    return step, f"none ({obstacle})"
