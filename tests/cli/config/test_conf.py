"""Every file under conf composes, passes validation and builds its object."""

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from flash_train.attention.kernels.families import is_own
from flash_train.cli.components.data import build_corpus, build_data
from flash_train.cli.components.loggers import build_logger
from flash_train.cli.components.model_config import build_model_config, choose_attention
from flash_train.cli.components.module import build_optimizer
from flash_train.cli.components.trainer import build_run_trainer
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.paths import conf_dir
from flash_train.cli.config.schema import ModelSchema, OptimizerSchema, RopeScalingSchema
from flash_train.cli.config.validate import RULES, validate
from flash_train.cli.run.build import build
from flash_train.model import MEMORY_MODES, ModelConfig, RopeScaling, Transformer
from flash_train.model.fp8 import RECIPES
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.step import training_backends
from flash_train.training import CausalLMModule, OptimizerConfig

FILES = sorted(path.relative_to(conf_dir()) for path in conf_dir().rglob("*.yaml"))
CHOICES = [path for path in FILES if path.parent != Path()]
ROOT = Path(__file__).parents[3]
#: the commands of extending.md use files of the reader's; `tests/docs` runs them
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "extending.md")]

# Keys that a choice requires
NEEDS = {
    "data/text": ["data.path=corpus"],
    "data/hub": ["data.name=corpus"],
    "model/pretrained": ["init_from=folder"],
    "experiment/extend_llama": ["init_from=folder"],
}
BYTES = 259


def composed(choice: Path, *overrides: str):
    name = choice.with_suffix("").as_posix()
    config = compose_config([f"{choice.parent}={choice.stem}", *NEEDS.get(name, []), *overrides])
    validate(config)
    return config


def of_group(group: str) -> list[Path]:
    found = [path for path in CHOICES if path.parent.name == group]
    assert found
    return found


def test_the_groups():
    groups = {path.parent.name for path in CHOICES}
    assert groups == {
        *("attention", "data", "experiment", "hardware", "logger"),
        *("memory", "model", "optimizer", "parallel", "trainer"),
    }


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_composes(choice):
    composed(choice)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_begins_with_a_comment(file):
    first = [line for line in (conf_dir() / file).read_text(encoding="utf-8").splitlines() if "@package" not in line][0]
    assert first.startswith("# ") and len(first) > 10


@pytest.mark.parametrize("choice", [c for c in of_group("model") if c.stem != "pretrained"], ids=str)
def test_model_is_built(choice):
    config = composed(choice)
    with torch.device("meta"):
        model = Transformer(build_model_config(config, BYTES, None), attention="sdpa")
    assert model.config.name == choice.stem
    assert model.config.vocab_size % 64 == 0
    expected = {
        "nano": (1e5, 2e6),
        "125m": (85e6, 130e6),
        "350m": (290e6, 360e6),
        "1b3": (1.2e9, 1.4e9),
        "8b": (8e9, 8.1e9),
    }
    low, high = expected[choice.stem]
    assert low < sum(parameter.numel() for parameter in model.parameters()) < high


def test_pretrained_takes_the_shape_of_init_from():
    given = ModelConfig(vocab_size=300, n_layers=1, width=8, n_heads=1, n_kv_heads=1, head_dim=8, mlp_width=8)
    config = composed(Path("model/pretrained.yaml"), "model.rope_theta=77.0", "attention.dropout=0.2")
    built = build_model_config(config, BYTES, given)
    assert built == dataclasses.replace(given, name="pretrained", rope_theta=77.0, attention_dropout=0.2)


@pytest.mark.parametrize("choice", of_group("attention"), ids=str)
def test_attention_is_resolved(choice):
    config = composed(choice)
    assert config.attention.backend == choice.stem
    if not is_own(choice.stem):  # our own backends have tests for machines that cannot run them
        assert choose_attention(config, torch.device("cpu"), 64)[0] in ("sdpa", "standard", "chunked")


@pytest.mark.parametrize("choice", of_group("memory"), ids=str)
def test_memory_mode_is_taken(choice):
    config = composed(choice)
    assert config.memory.mode == {"offload": "checkpoint"}.get(choice.stem, choice.stem)
    assert config.memory.offload == ("auto" if choice.stem == "offload" else 0)
    with torch.device("meta"):
        Transformer(build_model_config(config, BYTES, None), attention="sdpa", memory=config.memory.mode)


@pytest.mark.parametrize("choice", of_group("optimizer"), ids=str)
def test_optimizer_is_built(choice):
    built = build_optimizer(composed(choice, "max_steps=50"), width=384)
    assert built.lr == pytest.approx(1.2e-3) and built.warmup_steps == 5
    asked = build_optimizer(composed(choice, "optimizer.lr=0.1", "optimizer.warmup_steps=7"), width=384)
    assert asked.lr == 0.1 and asked.warmup_steps == 7


@pytest.mark.parametrize("choice", of_group("data"), ids=str)
def test_corpus_is_built(choice, corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    assert build_corpus(composed(choice).data).name == choice.stem


@pytest.mark.parametrize("choice", of_group("logger"), ids=str)
def test_logger_is_built(choice, tmp_path):
    logger = build_logger(composed(choice).logger, tmp_path, {"seq_len": 8})
    assert type(logger).__name__ == {"none": "NoneType", "wandb": "WandbLogger"}[choice.stem]
    if choice.stem == "wandb":
        logger.experiment.finish()


@pytest.mark.parametrize("choice", of_group("trainer"), ids=str)
def test_trainer_is_built(choice, tiny, tmp_path):
    config = composed(choice, *tiny)
    trainer = build_run_trainer(config, tmp_path / "run", build_data(config), parallel_plan(config))
    assert trainer.max_steps == 3


@pytest.mark.parametrize("choice", of_group("hardware"), ids=str)
def test_hardware_files_name_their_accelerator(choice):
    config = composed(choice)
    kind = {"auto": "auto", "cpu": "cpu", "mps": "mps"}.get(choice.stem, "cuda")
    assert config.trainer.accelerator == kind


@pytest.mark.parametrize("choice", of_group("experiment"), ids=str)
def test_experiment_is_built(choice):
    config = composed(choice)
    given = ModelConfig(vocab_size=320, n_layers=1, width=8, n_heads=1, n_kv_heads=1, head_dim=8, mlp_width=8)
    with torch.device("meta"):
        model = build_model_config(config, BYTES, given if config.init_from else None)
        module = CausalLMModule(
            model, build_optimizer(config, model.width), attention="sdpa", memory=config.memory.mode
        )
    assert module.model.memory == config.memory.mode


def test_schema_and_library_have_the_same_fields():
    def names(cls) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    assert names(ModelSchema) == names(ModelConfig) - {"attention_dropout"}
    assert names(RopeScalingSchema) == names(RopeScaling)
    assert names(OptimizerSchema) == names(OptimizerConfig)


def test_every_rule_has_a_key_that_exists():
    configs = [
        compose_config([f"data={name}", *NEEDS.get(f"data/{name}", [])]) for name in ("stdlib", "text", "hub", "recall")
    ]
    for key in RULES:
        *parents, name = key.split(".")
        holders = []
        for config in configs:
            node = config
            for parent in parents:
                node = node[parent]
            holders.append(name in node)
        assert any(holders), key


def test_schema_and_package_have_the_same_choices():
    assert set(RULES["attention.backend"].choices) == {"auto", *training_backends()}
    assert {path.stem for path in of_group("attention")} == {"auto", *training_backends()}
    assert RULES["precision"].choices == tuple(PRECISIONS)
    assert RULES["precision_fp8.recipe"].choices == RECIPES
    assert RULES["memory.mode"].choices == MEMORY_MODES


def commands(page: Path) -> list[str]:
    """The training commands in a page's code: the arguments of each, without comments and continued lines."""
    lines = page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found = [line.partition("  #")[0].replace("…", "x") for line in lines]
    return [line.partition("train.py ")[2] for line in found if line.startswith("python scripts/train.py ")]


@pytest.mark.parametrize("arguments", [c for page in PAGES for c in commands(page)])
def test_commands_in_the_pages_compose(arguments):
    given = [text for text in shlex.split(arguments) if "=" in text]
    for text in given:
        key, _, values = text.partition("=")
        for value in values.split(",") if "-m" in arguments else [values]:
            others = [other for other in given if not other.startswith(f"{key}=")]
            line = read([*(other.split(",")[0] for other in others), f"{key}={value}"])
            validate(compose_config(line.overrides, line.config_dir))


def test_help_names_every_choice():
    template = yaml.safe_load((conf_dir() / "train.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    lines = {line.split()[0]: line.split() for line in template.splitlines() if line.split()}
    for choice in CHOICES:
        assert choice.stem in lines[choice.parent.name], choice


@pytest.mark.parametrize(("given", "refused"), [(("data.packing=concat",), False), ((), True)])
def test_compiled_blocks_need_concat_packing(given, refused, tiny, tmp_path):
    config = compose_config([*tiny, "compile=true", "attention=sdpa", *given])
    if not refused:
        build(config, tmp_path)
        return
    with pytest.raises(UsageError, match=r"compile=true: with attention=sdpa .* allowed: data\.packing=concat"):
        build(config, tmp_path)
