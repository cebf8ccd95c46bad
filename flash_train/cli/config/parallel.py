"""The plan of a run on several devices, from its configuration: who shares weights and rows, and rows per step."""

from dataclasses import dataclass

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.distributed.dims import ParallelDims


@dataclass(frozen=True)
class ParallelPlan:
    """How the devices of a run divide the work.

    Args:
        dims: sizes; `shard` is 1 while the choice is still open.
        is_open: whether `parallel=auto` still has to choose, by the predicted memory, who shares weights and rows.
        accumulate: micro-batches in an optimizer step.
        batch_size: rows in a micro-batch of a data rank.
    """

    dims: ParallelDims
    is_open: bool
    accumulate: int
    batch_size: int

    @property
    def global_batch(self) -> int:
        """Rows in an optimizer step, over all devices."""
        return self.batch_size * self.dims.data_ranks * self.accumulate


def parallel_plan(config: DictConfig) -> ParallelPlan:
    """The plan that a configuration describes.

    Raises:
        UsageError: one line that names the key at fault.
    """
    given, ranks = config.parallel, config.trainer.devices * config.trainer.num_nodes
    mode = mode_of(config)
    if mode == "none" and ranks > 1:
        raise UsageError(f"parallel=none: there are {ranks} devices; allowed: auto, ddp, fsdp, context")
    if mode in ("none", "ddp") and given.shard not in (None, 1):
        raise UsageError(f"parallel.shard={given.shard}: parallel={mode} keeps whole weights; allowed: parallel=fsdp")
    whole = mode in ("none", "ddp") or (
        mode == "auto" and given.shard in (None, 1) and given.replicate in (None, ranks)
    )
    context = given.context or (ranks if mode == "context" else 1)
    try:
        dims = ParallelDims.of(ranks, replicate=given.replicate, shard=1 if whole else given.shard, context=context)
    except ValueError as error:
        raise UsageError(str(error)) from error
    tokens = config.seq_len * config.batch_size
    if tokens % context:
        raise UsageError(
            f"parallel.context={context}: must divide the tokens of a batch, seq_len={config.seq_len} x "
            f"batch_size={config.batch_size}"
        )
    if dims.shard > 1 and config.precision == "fp16-mixed":
        raise UsageError("precision=fp16-mixed: sharded weights need another; allowed: bf16-mixed, bf16-true, fp32")
    if given.check and config.precision == "fp16-mixed":  # its first steps may overflow
        raise UsageError("parallel.check=true precision=fp16-mixed: allowed: bf16-mixed, bf16-true, fp32")
    is_open = mode == "auto" and ranks > 1 and given.shard is None and given.replicate is None
    return ParallelPlan(dims, is_open, accumulate_of(config, dims.data_ranks), config.batch_size)


def mode_of(config: DictConfig) -> str:
    """`parallel.mode`, or what `trainer.strategy` says in its place."""
    mode, alias = config.parallel.mode, config.trainer.strategy
    if alias == "auto" or mode == alias:
        return mode
    if mode != "auto":
        raise UsageError(f"trainer.strategy={alias} parallel={mode}: they differ; allowed: one of them")
    return alias


def accumulate_of(config: DictConfig, data_ranks: int) -> int:
    """Micro-batches in an optimizer step: `accumulate`, or as many as `global_batch` needs."""
    if config.global_batch is None:
        return config.accumulate or 1
    if config.accumulate is not None:
        raise UsageError(f"global_batch={config.global_batch} accumulate={config.accumulate}: allowed: one of them")
    rows = config.batch_size * data_ranks
    if config.global_batch % rows:
        raise UsageError(
            f"global_batch={config.global_batch}: must be a multiple of the {rows} rows that batch_size="
            f"{config.batch_size} gives {data_ranks} data rank{'s' if data_ranks > 1 else ''}"
        )
    return config.global_batch // rows
