"""The rotary positions of a model from `init_from`: which rule the run uses, and advice for longer rows.

The advice keeps the model's own rule and scales it further; YaRN is proposed only if the model has no rule.
"""

from typing import Any, get_args

from omegaconf import DictConfig

from flash_train.cli.config.errors import UsageError
from flash_train.model import ModelConfig, pretrained_config, pretrained_length, pretrained_rule, pretrained_values
from flash_train.model.config import ORIGINAL_LENGTH, RopeKind, RopeScaling
from flash_train.model.pretrained import LLAMA_LENGTH, rope_parameters
from flash_train.model.rope import rope_frequencies

PLAIN = "none"  # the value of model.rope_scaling.kind for rotary positions without scaling
FASTER = 1.001  # a smaller ratio of frequencies is a rounding error
KEY = "model.rope_scaling"


def merged_rule(own: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """The model's own rule with the given values in it; a rule of another kind replaces it completely."""
    if given.get("kind") == PLAIN:
        if more := sorted(given.keys() - {"kind"}):
            raise UsageError(f"{KEY}.{more[0]}={given[more[0]]}: {KEY}.kind={PLAIN} takes none; allowed: another kind")
        return None
    same = own is not None and given.get("kind", own["kind"]) == own["kind"]
    merged = {**own, **given} if own is not None and same else given
    _require_whole(merged)
    return merged


def keeps_rule(config: DictConfig) -> bool:
    """Whether the run reads the rule in `init_from`; False if `model.rope_scaling.kind` names another one.

    Raises:
        UsageError: the rule is the "dynamic" one of `transformers`, which depends on the length of each input. The
            message names a rule with the same frequencies at this run's length.
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
    """The model in `init_from` with its own rule; None if that rule is not supported."""
    try:
        return pretrained_config(config.init_from)
    except ValueError:  # the rule is at fault: everything else was read before
        return None


def rotary_note(config: DictConfig, built: ModelConfig) -> str | None:
    """A note on the rotary positions of a model from `init_from`; None if nothing is wrong with them.

    Either the rows are longer than the model was trained for, and the note names a setting that stretches its rule. Or
    the settings make the positions rotate faster than in training, where the model has not been trained.
    """
    if config.init_from is None or (own := own_model(config)) is None:
        return None
    made_for = pretrained_length(config.init_from)
    longer = made_for is not None and config.seq_len > made_for
    times = (rope_frequencies(built)[0] / rope_frequencies(own)[0]).max().item()
    if times > FASTER:
        return f"its positions turn up to {times:.3g} times as fast as it was trained with; {_keep(config, own, built)}"
    if made_for is None or not longer or _is_changed(own, built) or config.resume is not None:
        return None  # a resumed run must have the rule of its checkpoint
    rows = f"made for rows of {made_for:,} tokens and these have {config.seq_len:,}"
    by = config.seq_len / made_for
    if own.rope_scaling is None:
        advice = _setting(kind="yarn", factor=by, original_max_position_embeddings=made_for)
    else:
        advice = _rule_setting(own.rope_scaling.stretched(by))
    if own.rope_scaling is not None and own.rope_scaling.kind == "linear":
        # max_position_embeddings includes the scaling in some files, as in transformers, but not in all.
        return (
            f"the one in init_from was {rows}, by its max_position_embeddings; if its linear scaling by "
            f"{_number(own.rope_scaling.factor)} reaches no farther, {advice} would stretch it"
        )
    return f"the one in init_from was {rows}; {advice} would stretch it"


def _require_whole(rule: dict[str, Any]) -> None:
    """Raise if a rule lacks values; the message names all of them."""
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
    """The settings that keep a model's rule, stretched if the rows are longer."""
    settings = [] if own.rope_theta == built.rope_theta else [f"model.rope_theta={_number(own.rope_theta)}"]
    if own.rope_scaling != built.rope_scaling:
        made_for = pretrained_length(config.init_from)
        by = max(1.0, config.seq_len / made_for) if made_for else 1.0
        rule = own.rope_scaling and own.rope_scaling.stretched(by)
        settings.append(_rule_setting(rule) if rule else f"{KEY}.kind={PLAIN}")
    return f"{' '.join(settings)} would keep its rule"


def _dynamic_factor(config: DictConfig) -> float:
    """The factor of NTK-aware scaling that has the same base as the dynamic rule at `seq_len` tokens."""
    values = pretrained_values(config.init_from)
    made_for = values.get("max_position_embeddings") or LLAMA_LENGTH
    factor = rope_parameters(values).get("factor") or 1.0
    return factor * max(config.seq_len, made_for) / made_for - (factor - 1)


def _rule_setting(rule: RopeScaling) -> str:
    """The overrides that turn a model's own rule into `rule`, a result of `RopeScaling.stretched`."""
    return _setting(kind=rule.kind, factor=rule.factor, attention_factor=rule.attention_factor)


def _setting(**values: Any) -> str:
    return " ".join(f"{KEY}.{name}={_number(value)}" for name, value in values.items() if value is not None)


def _number(value: Any) -> Any:
    return f"{value:.10g}" if isinstance(value, float) else value
