"""The configuration of a model: its shape and its rotary scaling, as frozen dataclasses."""

import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flash_train.attention import AttentionSpec
from flash_train.checks import POSITIVE, at_least, check, check_name, integer_at_least, within

RopeKind = Literal["linear", "ntk", "yarn", "llama3"]

# The parameters that each rule takes in addition to `factor`. Any other is an error.
_RULE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "ntk": (),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}

ORIGINAL_LENGTH = tuple(kind for kind, names in _RULE_FIELDS.items() if "original_max_position_embeddings" in names)


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's factor on cosines and sines (arXiv:2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1.0


@dataclass(frozen=True)
class RopeScaling:
    """A rule that stretches rotary frequencies to reach a longer context.

    `linear`: positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    `ntk`: theta multiplied by factor^(d/(d-2)), "NTK-aware" (bloc97 2023); it does not change with the length.
    `yarn`: interpolation by wavelength and an attention factor (Peng et al. 2023, arXiv:2309.00071).
    `llama3`: the rule of Llama 3.1 (arXiv:2407.21783).
    The fields have the names of `transformers`' `rope_scaling`. A field that the rule does not take keeps its default.

    Raises:
        ValueError: an unknown rule, a number out of range, or a field that the rule does not take.
    """

    kind: RopeKind
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_name("model.rope_scaling.kind", self.kind, get_args(RopeKind))
        check("model.rope_scaling.factor", self.factor, at_least(1.0))
        needs_length = "original_max_position_embeddings" in _RULE_FIELDS[self.kind]
        if needs_length and not (self.original_max_position_embeddings or 0) > 0:
            raise ValueError(
                f"model.rope_scaling.original_max_position_embeddings={self.original_max_position_embeddings}: must be "
                f"the length in tokens that the model was trained at, which {self.kind} needs"
            )
        taken = ("factor", *_RULE_FIELDS[self.kind])
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in taken and value is not None:
                check(f"model.rope_scaling.{name}", value, POSITIVE)
            elif name not in ("kind", *taken) and value != field.default:
                raise ValueError(
                    f"model.rope_scaling.{name}={value}: must be left out; {self.kind} takes {', '.join(taken)}"
                )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor}: must be more than 0 and less than "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"model.rope_scaling.beta_slow={self.beta_slow}: must be more than 0 and less than "
                f"beta_fast={self.beta_fast}"
            )

    @classmethod
    def from_hf(cls, parameters: dict[str, Any] | None) -> "RopeScaling | None":
        """Read the `rope_scaling` (transformers 4) or `rope_parameters` (5) of a config.json; None for plain rotary.

        The caller reads `rope_theta` itself. Raises ValueError for an unknown rule or parameter.
        """
        given = {k: v for k, v in (parameters or {}).items() if v is not None and k != "rope_theta"}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        if given.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("rope_parameters.partial_rotary_factor: must be 1.0")
        if kind == "default":
            return None
        if kind not in get_args(RopeKind) or kind == "ntk":  # transformers has no rule of that name
            raise ValueError(
                f"rope_type={kind!r}: must be linear, yarn, llama3 or default; model.rope_scaling.kind= replaces it"
            )
        unknown = given.keys() - {"factor", *_RULE_FIELDS[kind]}
        if kind in ("linear", "llama3"):
            unknown -= {"original_max_position_embeddings"}
        if unknown:
            raise ValueError(f"rope_type={kind!r}: must not have {', '.join(sorted(unknown))}")
        if "factor" not in given:
            raise ValueError(
                f"rope_type={kind!r}: has no factor; give model.rope_scaling.kind={kind} "
                "model.rope_scaling.factor=NUMBER"
            )
        return cls(kind=kind, **{k: v for k, v in given.items() if k == "factor" or k in _RULE_FIELDS[kind]})

    def stretched(self, by: float) -> "RopeScaling":
        """Return the same rule for rows `by` times as long: the pairs that it interpolates rotate `by` times slower.

        Other pairs rotate as they did in training. An explicit attention factor grows as YaRN's default does.
        """
        factor, attention_factor = self.factor * by, self.attention_factor
        if attention_factor is not None:
            attention_factor *= yarn_attention_factor(factor) / yarn_attention_factor(self.factor)
        return dataclasses.replace(self, factor=factor, attention_factor=attention_factor)

    def to_hf(self) -> dict[str, Any]:
        """Return `transformers`' `rope_scaling` dictionary.

        Raises ValueError for `ntk`, which `transformers` expresses as a larger theta.
        """
        if self.kind == "ntk":
            raise ValueError("ntk scaling is written as rope_theta: use ntk_theta")
        fields = {name: getattr(self, name) for name in ("factor", *_RULE_FIELDS[self.kind])}
        return {"rope_type": self.kind} | {k: v for k, v in fields.items() if v is not None}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder: pre-norm blocks of grouped-query attention and SwiGLU, rotary positions.

    Args:
        vocab_size: rows of the embedding.
        n_layers: transformer blocks.
        width: of the residual stream.
        n_heads, n_kv_heads: of queries, and of keys and values; `n_heads` is a multiple of `n_kv_heads`.
        head_dim: even, at most 256. Attention works in `n_heads * head_dim` columns, which need not equal `width`.
        mlp_width: columns of the gate and of the up projection in SwiGLU.
        name: for records and pictures.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how rotary positions are scaled to longer rows; None does not scale them.
        norm_eps: added to the mean square in RMSNorm.
        qk_norm: RMSNorm of each head's queries and keys before the rotary embedding.
        tied_embeddings: the head's weights are the embedding's.
        attention_dropout: probability that an attention weight is dropped, rounded to a multiple of 1/256.
        residual_dropout: probability that an element of a block's output is dropped.

    Raises:
        ValueError, TypeError: names the key of a shape that cannot be built.
    """

    vocab_size: int
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_width: int
    name: str = "custom"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied_embeddings: bool = True
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("vocab_size", "n_layers", "width", "n_heads", "n_kv_heads", "head_dim", "mlp_width"):
            check(f"model.{key}", getattr(self, key), integer_at_least(1))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"model.n_heads={self.n_heads}: must be a multiple of model.n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2 or self.head_dim > 256:
            raise ValueError(f"model.head_dim={self.head_dim}: must be even and at most 256")
        check("model.residual_dropout", self.residual_dropout, within(0, 1, "[)"))
        try:
            AttentionSpec(dropout=self.attention_dropout)  # otherwise the first forward would refuse it
        except ValueError as error:
            raise ValueError(f"model.attention_{error}") from None
        for key in ("rope_theta", "norm_eps"):
            check(f"model.{key}", getattr(self, key), POSITIVE)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise TypeError(f"model.rope_scaling={self.rope_scaling!r}: must be a RopeScaling or None")
        if self.rope_scaling and self.rope_scaling.kind == "ntk":
            if self.head_dim < 4:
                raise ValueError(f"model.head_dim={self.head_dim}: must be at least 4 with model.rope_scaling.kind=ntk")
            factor = self.rope_scaling.factor
            larger = self.head_dim / (self.head_dim - 2) * math.log(factor)  # see `ntk_theta`
            if math.log(self.rope_theta) + larger > math.log(sys.float_info.max):
                raise ValueError(
                    f"model.rope_scaling.factor={factor}: must be smaller, as with model.rope_scaling.kind=ntk the "
                    "theta that it makes exceeds a float"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values (numbers, strings, None, one nested dictionary) for a checkpoint or JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Invert `to_dict`. Raises ValueError for a key that is not a field or a field that is missing."""
        values = dict(values)
        if isinstance(values.get("rope_scaling"), dict):
            _check_keys(RopeScaling, values["rope_scaling"], "model.rope_scaling.")
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        _check_keys(cls, values, "model.")
        return cls(**values)

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: projections, MLPs and the output head; not the embedding, not norms."""
        attention = self.width * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.width * self.mlp_width) + self.vocab_size * self.width

    @property
    def num_parameters(self) -> int:
        """All weights; tied embeddings are counted once."""
        norms = self.width * (2 * self.n_layers + 1) + 2 * self.head_dim * self.n_layers * self.qk_norm
        return self.matmul_parameters + norms + self.vocab_size * self.width * (not self.tied_embeddings)


def _check_keys(cls: type, values: dict[str, Any], prefix: str) -> None:
    fields = dataclasses.fields(cls)
    if unknown := values.keys() - {f.name for f in fields}:
        raise ValueError(
            f"{prefix}{sorted(unknown)[0]} is not a field: must be one of {', '.join(f.name for f in fields)}"
        )
    if missing := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
