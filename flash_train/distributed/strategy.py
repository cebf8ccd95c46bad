"""Lightning strategies for several devices: whole weights on each (DDP), or sharded weights (FSDP2).

With ``context > 1`` neighbouring ranks share each row; `flash_train.training.CausalLMModule` divides it.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flash_train.attention.parallel import Method
from flash_train.distributed.background import BackgroundWriter, write_with
from flash_train.distributed.checkpoint import (
    Place,
    is_sharded_checkpoint,
    load_sharded,
    read_values,
    save_sharded,
)
from flash_train.distributed.dims import ParallelDims
from flash_train.distributed.launcher import WatchedLauncher, end_with_parent
from flash_train.distributed.leave import leave_groups
from flash_train.distributed.mesh import CONTEXT, rows_mesh, weights_mesh
from flash_train.distributed.same_weights import check_same_weights
from flash_train.distributed.sharding import is_sharded, load_state, materialize, shard_module, state_like, state_zeros
from flash_train.distributed.watch import RankWatch
from flash_train.output import LOGGER

# `RankWatch` ends a run that hangs and names the rank that is missing. Collectives time out this much later.
TIMEOUT_MARGIN = timedelta(minutes=1)


class _Ranks(ParallelStrategy):
    """Says which rows a rank processes, and which ranks share them; ends all ranks when one fails, dies or hangs.

    Attributes:
        dims: how the ranks divide weights and rows, once the number of ranks is known.
        context_group: the ranks that share this rank's rows; None if each rank has its own rows.
        context_method: how they divide attention (see `flash_train.attention.parallel.shared_attention`).
        exit_status: the status with which all ranks exit after an exception on one of them.
        watch: see `RankWatch`; None before the ranks are connected, and if there is one rank.
    """

    context_group: ProcessGroup | None = None
    context_method: Method = "auto"
    exit_status: Callable[[BaseException], int] = staticmethod(lambda error: 1)
    watch: RankWatch | None = None
    timeout: timedelta | None
    _sizes: Mapping[str, int | None]

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self.num_nodes * self.num_processes, **self._sizes)  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dims.data_ranks, "rank": self.dims.data_rank(self.global_rank)}

    def _join_ranks(self) -> None:
        """Watch the other ranks, and form the context groups.

        On CPUs, a process destroys its groups when it ends; Lightning does so for NCCL only.
        """
        if self.root_device.type == "cpu":
            atexit.register(leave_groups)
        if self.world_size > 1:
            self._watch_ranks()
        if self.dims.context > 1:
            self.context_group = rows_mesh(self.dims, self.root_device.type).get_group(CONTEXT)

    def _watch_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.watch = RankWatch(
            self.global_rank,
            self.world_size,
            self.cluster_environment.main_address,
            self.timeout.total_seconds() if self.timeout else None,
            reports_first_rank=self.global_rank == 1 or self.local_rank == 0,
            exit_status=self.exit_status,
        )
        if isinstance(self.launcher, WatchedLauncher):
            kill = self.launcher.kill_children
            self.watch.before_exit.append(lambda reason: kill())

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if type(self._launcher) is _SubprocessScriptLauncher:
            arguments = self.cluster_environment, self._launcher.num_processes, self._launcher.num_nodes
            self._launcher = WatchedLauncher(*arguments, is_watched=lambda: self.watch is not None)
        end_with_parent(lambda: self.watch is not None)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.watch is not None:
            self.watch.report_failure(exception, on_all_ranks=_is_on_all_ranks(exception))
            exception.add_note(f"This was rank {self.global_rank} of {self.world_size}.")
            if isinstance(exception, SystemExit):  # Python prints no traceback for it
                LOGGER.error("rank %s called sys.exit(%r); all ranks end", self.global_rank, exception.code)
        elif isinstance(self.launcher, WatchedLauncher):
            self.launcher.kill_children()

    def teardown(self) -> None:
        super().teardown()
        if self.watch is not None:
            self.watch.leave()


def _is_on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raises this error: its `on_all_ranks` says so, or a signal to all ranks caused it."""
    return getattr(error, "on_all_ranks", isinstance(error, KeyboardInterrupt | SIGTERMException))


class ReplicatedStrategy(_Ranks, DDPStrategy):
    """Whole weights on every device; gradients are averaged in the weights' dtype while the backward runs.

    Args:
        context: how many neighbouring ranks share a row.
        method: how they divide attention.
        timeout: how long ranks wait at a collective for one that does not arrive; None waits without limit.
        process_group_backend: None takes nccl on GPUs and gloo on CPUs.

    Raises:
        ValueError: when training begins, if ``context`` does not divide the number of devices.
    """

    def __init__(
        self,
        context: int = 1,
        *,
        method: Method = "auto",
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            timeout=timeout + TIMEOUT_MARGIN if timeout else None,
            process_group_backend=process_group_backend,
            gradient_as_bucket_view=True,
        )
        self.timeout = timeout
        self._sizes = {"shard": 1, "context": context}
        self.context_method = method

    def setup_environment(self) -> None:
        super().setup_environment()
        self._join_ranks()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the model on the stream that training uses.

        Lightning wraps it on another one, where the gradients would then be accumulated; every gradient would wait for
        that stream, and PyTorch would warn.
        """
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


class ShardedStrategy(_Ranks, ModelParallelStrategy):
    """Weights, gradients and optimizer state sharded with FSDP2, block by block.

    It shards any LightningModule: each element of its outermost ``nn.ModuleList`` or ``nn.Sequential`` containers
    is gathered by itself, and all other weights together. All ranks get the first rank's weights. Weights on the meta
    device are allocated sharded and then filled (see `flash_train.distributed.sharding.materialize`), and others keep
    their values; give all ranks the same seed.

    Args:
        shard: how many neighbouring ranks share one copy of the weights; None: all ranks, or all of a replica.
        replicate: number of copies of the weights; None: as many as ``shard`` leaves.
        context: how many neighbouring ranks share a row; needs a module that divides its rows, as
            `flash_train.training.CausalLMModule` does.
        method: how they divide attention.
        timeout: how long ranks wait at a collective for one that does not arrive; None waits without limit.
        process_group_backend: None takes nccl on GPUs and gloo on CPUs.

    Raises:
        ValueError: when training begins, if the sizes do not fit the number of devices, or if nothing fills weights on
            the meta device.
    """

    def __init__(
        self,
        shard: int | None = None,
        replicate: int | None = None,
        context: int = 1,
        *,
        method: Method = "auto",
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            timeout=timeout + TIMEOUT_MARGIN if timeout else None, process_group_backend=process_group_backend
        )
        self.timeout = timeout
        self._sizes = {"shard": shard, "replicate": replicate, "context": context}
        self.context_method = method

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = weights_mesh(self.dims, self.root_device.type)
        self._join_ranks()

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.model)
        if not is_sharded(module):  # an earlier call of the Trainer, such as `fit`, may have sharded it
            shard_module(
                module,
                self.device_mesh,
                self.mixed_precision,
                self.root_device,
                exchanges_gradients=self._exchanges_gradients,
            )
            materialize(module, self.root_device, loads_state=trainer.ckpt_path is not None)
        self.model = module
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Gather the weights in the dtype of the computation, and reduce gradients in fp32.

        `GradientSums` takes gradients in their own dtype, and adds them in fp32.
        """
        computes_in = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
        dtype = computes_in.get(self.precision_plugin.precision)
        # Blocks compute their inputs' dtypes themselves; a recomputation would not repeat a cast of FSDP's
        reduces_in = torch.float32 if dtype and not self._exchanges_gradients else None
        return MixedPrecisionPolicy(dtype, reduces_in, cast_forward_inputs=False)

    @property
    def _exchanges_gradients(self) -> bool:
        return self.dims.exchanges_gradients(self.precision_plugin.precision, self.num_processes)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce gradients over the shards only; the last micro-batch of a step reduces them over the replicas."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self.model.set_requires_all_reduce(True)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    # -- checkpoints. A folder is sharded; a file holds whole tensors, from a run on one device or with DDP.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        path = Path(self.broadcast(filepath))
        group = storage_options.group if isinstance(storage_options, BackgroundWriter) else None
        write_with(storage_options, checkpoint, save_sharded, path=path, group=group)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if is_sharded_checkpoint(path):
            for optimizer, state in zip(self.optimizers, read_values(path).get("optimizer_states", ()), strict=False):
                check_same_weights(optimizer, state)  # the weights decide where the state is read to
            return load_sharded(path, self._destinations())
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def _destinations(self) -> Callable[[Place, torch.Size, torch.dtype], Tensor | None]:
        """Return a function from a checkpoint's tensor to the one that it is read into: a weight, or new state."""
        assert self.lightning_module is not None
        weights = self.lightning_module.state_dict()
        parameters = [_parameters(optimizer) for optimizer in self.optimizers]
        devices = [_state_device(optimizer) for optimizer in self.optimizers]

        def destination(place: Place, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            match place:
                case ("state_dict", str(name)):
                    return weights.get(name)
                case ("optimizer_states", int(number), "state", int(index), _) if number < len(parameters):
                    return state_zeros(parameters[number][index], shape, dtype, devices[number])
            return None

        return destination

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            check_same_weights(optimizer, state)
            parameters, device = _parameters(optimizer), _state_device(optimizer)
            values = {
                index: {name: state_like(value, parameters[index], device) for name, value in entries.items()}
                for index, entries in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": values})


# `Trainer(strategy="flash_sharded")` works once this module is imported
StrategyRegistry.register("flash_sharded", ShardedStrategy, "Weights sharded with FSDP2, block by block")
StrategyRegistry.register("flash_replicated", ReplicatedStrategy, "Whole weights on every device")


def _state_device(optimizer: Optimizer) -> torch.device | None:
    """Return where an optimizer keeps its state; None: where the parameters are."""
    return torch.device("cpu") if optimizer.defaults.get("offload", False) else None


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of their numbers in the optimizer's state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
