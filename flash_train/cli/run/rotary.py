"""The rotary positions of the model in `init_from`: what `model` makes of them, and advice where rows are longer.

Advice keeps the rule that the model was trained with and scales it further: YaRN is for plain rotary positions alone.
"""

from typing import Any, get_args

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.model import ModelConfig, pretrained_config, pretrained_length, pretrained_rule, pretrained_values
from flash_train.model.config import ORIGINAL_LENGTH, RopeKind, RopeScaling
from flash_train.model.pretrained import LLAMA_LENGTH
from flash_train.model.rope import rope_frequencies

PLAIN = "none"  # model.rope_scaling.kind of plain rotary positions
FASTER = 1.001  # a pair that turns this many times as fast as in training; less is rounding
KEY = "model.rope_scaling"


def merged_rule(own: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """`model.rope_scaling` over the model's own rule: what is given replaces its values, another kind the whole."""
    if given.get("kind") == PLAIN:
        if more := sorted(given.keys() - {"kind"}):
            raise UsageError(f"{KEY}.{more[0]}={given[more[0]]}: {KEY}.kind={PLAIN} takes none; allowed: another kind")
        return None
    same = own is not None and given.get("kind", own["kind"]) == own["kind"]
    merged = {**own, **given} if own is not None and same else given
    _require_whole(merged)
    return merged


def keeps_rule(config: DictConfig) -> bool:
    """Whether the run reads the rule in `init_from`: not where `model.rope_scaling.kind` names another.

    Raises UsageError for the rule of `transformers` that follows the length of each input, with one that gives the same
    frequencies at the length of this run's rows.
    """
    folder, kind = config.init_from, config.model.rope_scaling.kind
    rule = pretrained_rule(folder)
    if kind is not None:
        return kind == rule and own_model(config) is not None
    if rule == "dynamic":
        raise UsageError(
            f"init_from={folder}: its rotary rule 'dynamic' changes with the length of an input; for rows of "
            f"{config.seq_len:,} tokens it is: {KEY}.kind=ntk {KEY}.factor={_number(_dynamic_factor(config))}"
        )
    return True


def own_model(config: DictConfig) -> ModelConfig | None:
    """The model in `init_from` with its own rule; None where the rule is one that cannot be read."""
    try:
        return pretrained_config(config.init_from)
    except ValueError:  # of the rule: everything else was read before
        return None


def rotary_note(config: DictConfig, built: ModelConfig) -> str | None:
    """What a user should know about the rotary positions of a model from `init_from`; None where all is well.

    Either rows are longer than the model was made for, and a setting stretches the rule that it has; or the settings
    make its positions turn faster than in training, which it has never seen.
    """
    if config.init_from is None or (own := own_model(config)) is None:
        return None
    made_for = pretrained_length(config.init_from)
    longer = made_for is not None and config.seq_len > made_for
    times = (rope_frequencies(built)[0] / rope_frequencies(own)[0]).max().item()
    if times > FASTER:
        return f"its positions turn up to {times:.3g} times as fast as it was trained with; {_keep(config, own, built)}"
    if made_for is None or not longer or _is_changed(own, built) or config.resume is not None:
        return None  # a resumed run has the rule of its checkpoint, and another one is refused
    rows = f"made for rows of {made_for:,} tokens and these have {config.seq_len:,}"
    by = config.seq_len / made_for
    if own.rope_scaling is None:
        advice = _setting(kind="yarn", factor=by, original_max_position_embeddings=made_for)
    else:
        advice = _rule_setting(own.rope_scaling.stretched(by))
    if own.rope_scaling is not None and own.rope_scaling.kind == "linear":
        # Some files count the scaling in max_position_embeddings, as transformers says, and some do not.
        return (
            f"the one in init_from was {rows}, by its max_position_embeddings; if its linear scaling by "
            f"{_number(own.rope_scaling.factor)} reaches no farther, {advice} would stretch it"
        )
    return f"the one in init_from was {rows}; {advice} would stretch it"


def _require_whole(rule: dict[str, Any]) -> None:
    """Refuse a rule that lacks a value, and name all that it lacks: one at a time, each would be another refusal."""
    length = f"{KEY}.original_max_position_embeddings"
    if "kind" not in rule:
        raise UsageError(
            f"{KEY}.kind is missing; give one of {', '.join(get_args(RopeKind))}; yarn and llama3 need {length} too"
        )
    missing = [] if "factor" in rule else [f"{KEY}.factor=NUMBER"]
    if rule["kind"] in ORIGINAL_LENGTH and not rule.get("original_max_position_embeddings"):
        missing.append(f"{length}=TOKENS")
    if missing:
        raise UsageError(f"{KEY}.kind={rule['kind']}: needs {' '.join(missing)} too")


def _is_changed(own: ModelConfig, built: ModelConfig) -> bool:
    return (own.rope_theta, own.rope_scaling) != (built.rope_theta, built.rope_scaling)


def _keep(config: DictConfig, own: ModelConfig, built: ModelConfig) -> str:
    """The settings with which a model keeps its rule, and, where rows are longer, stretches it."""
    settings = [] if own.rope_theta == built.rope_theta else [f"model.rope_theta={_number(own.rope_theta)}"]
    if own.rope_scaling != built.rope_scaling:
        made_for = pretrained_length(config.init_from)
        by = max(1.0, config.seq_len / made_for) if made_for else 1.0
        rule = own.rope_scaling and own.rope_scaling.stretched(by)
        settings.append(_rule_setting(rule) if rule else f"{KEY}.kind={PLAIN}")
    return f"{' '.join(settings)} would keep its rule"


def _dynamic_factor(config: DictConfig) -> float:
    """By which NTK-aware scaling has the base that the dynamic rule has for rows of `seq_len` tokens."""
    values = pretrained_values(config.init_from)
    rope = values.get("rope_parameters") or values["rope_scaling"]
    made_for = values.get("max_position_embeddings") or LLAMA_LENGTH
    factor = rope.get("factor") or 1.0
    return factor * max(config.seq_len, made_for) / made_for - (factor - 1)


def _rule_setting(rule: RopeScaling) -> str:
    """What turns a model's own rule into `rule`, which `RopeScaling.stretched` made of it."""
    return _setting(kind=rule.kind, factor=rule.factor, attention_factor=rule.attention_factor)


def _setting(**values: Any) -> str:
    return " ".join(f"{KEY}.{name}={_number(value)}" for name, value in values.items() if value is not None)


def _number(value: Any) -> Any:
    return f"{value:.10g}" if isinstance(value, float) else value
