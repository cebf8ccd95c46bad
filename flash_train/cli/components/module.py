"""The module of a run: its model, with the weights of `init_from` if there are any, and its optimizer."""

from functools import partial

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from flash_train.cli.components.model_config import plain
from flash_train.cli.components.rotary import keeps_rule
from flash_train.cli.config.errors import UnavailableError, blame
from flash_train.data import PackedDataModule, RecallCorpus
from flash_train.distributed.sharding import load_state
from flash_train.distributed.strategy import ShardedStrategy
from flash_train.model import ModelConfig, PretrainedSource, Transformer, load_pretrained
from flash_train.model.fp8 import fp8_obstacle, to_fp8
from flash_train.precision import PRECISIONS
from flash_train.training import CausalLMModule, OptimizerConfig

BASE_LR, BASE_WIDTH = 6e-4, 768

Pretrained = tuple[ModelConfig, dict[str, torch.Tensor]]


def load_init(config: DictConfig) -> Pretrained | None:
    """The shape and weights of the model in `init_from`; None if the run starts from random weights."""
    if config.init_from is None:
        return None
    with blame(f"init_from={config.init_from}"):
        return load_pretrained(config.init_from, rope_scaling=keeps_rule(config))


def init_module(
    config: DictConfig,
    model: ModelConfig,
    backend: str,
    data: PackedDataModule,
    pretrained: Pretrained | None,
    trainer: Trainer,
) -> CausalLMModule:
    """The module on the trainer's device and in its precision, with its first weights.

    For sharded weights it is on the meta device: the strategy allocates each rank's part, and then fills it.
    """
    shards = isinstance(trainer.strategy, ShardedStrategy)
    with blame("model"), trainer.init_module(empty_init=shards or None):
        module = build_module(config, model, backend, data)
    if PRECISIONS[config.precision].fp8:
        convert_to_fp8(config, module, trainer.strategy.root_device)
    if shards:
        module.first_weights = partial(first_weights, seed=config.seed, state=pretrained[1] if pretrained else None)
    elif pretrained:
        module.model.load_state_dict(pretrained[1])
    if pretrained:
        module.pretrained = PretrainedSource.read(config.init_from).to_dict()
    return module


def convert_to_fp8(config: DictConfig, module: CausalLMModule, device: torch.device) -> None:
    """Give the module's blocks fp8 products.

    Raises:
        UnavailableError: the device or the installation has none.
        UsageError: the model's widths do not allow them.
    """
    if obstacle := fp8_obstacle(device):
        raise UnavailableError(f"precision=fp8: {obstacle}; allowed: bf16-true")
    with blame("precision=fp8"):
        to_fp8(module.model, config.precision_fp8.recipe)


def first_weights(model: Transformer, *, seed: int, state: dict[str, torch.Tensor] | None) -> None:
    """Fill weights that a strategy has allocated, with the values that they have on one device."""
    if state is None:
        torch.manual_seed(seed)
        model.draw_weights()
    else:  # the tensors are mapped from the files, so that each rank reads its own part only
        load_state(model, state)


def build_module(config: DictConfig, model: ModelConfig, backend: str, data: PackedDataModule) -> CausalLMModule:
    """The module with random weights."""
    chance = data.corpus.chance if isinstance(data.corpus, RecallCorpus) else None
    return CausalLMModule(
        model,
        build_optimizer(config, model.width),
        attention=backend,
        memory=config.memory.mode,
        compile=config.compile,
        val_bytes_per_token=data.bytes_per_token,
        answer_accuracy=chance is not None,
        chance_level=chance,
    )


def build_optimizer(config: DictConfig, width: int) -> OptimizerConfig:
    """The optimizer's settings. The default learning rate depends on the width, the default warm-up on the steps."""
    values = plain(config.optimizer)
    if values["lr"] is None:
        values["lr"] = BASE_LR * BASE_WIDTH / width
    if values["warmup_steps"] is None:
        values["warmup_steps"] = min(200, config.max_steps // 10)
    values["in_backward"] = bool(values["in_backward"])  # null: not chosen
    return OptimizerConfig.from_dict(values)
