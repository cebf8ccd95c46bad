"""The parts of a decoder block. Activations are packed, (tokens, width), except in unpacked attention."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.attention import AttentionSpec, Causal, Packing, attention
from flash_train.attention.dropout import RngState, draw_state
from flash_train.attention.parallel import SharedRow, shared_attention
from flash_train.model import ops
from flash_train.model.config import ModelConfig
from flash_train.model.products import Adding
from flash_train.model.tiled_mlp import tiled_mlp

Layout = Packing | SharedRow | None
"""Where documents begin: None for one document per row, or the part of a row that this rank holds."""


class Linear(nn.Linear):
    """A linear layer without bias. `Transformer.reset_parameters` draws its weights, once.

    Attributes:
        adding: whether the backward adds to `weight.grad` within its product (see `Transformer.adding_gradients`).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.adding = Adding()

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, adds=self.adding.on)

    def reset_parameters(self) -> None:
        pass


class SwiGLULinear(Linear):
    """A linear layer over silu(gate) · up. On CUDA it does not keep this product for its backward."""

    def forward(self, gate: Tensor, up: Tensor, *, needs_value: bool = True) -> Tensor:  # type: ignore[override]
        return ops.swiglu_linear(gate, up, self.weight, needs_value=needs_value, adds=self.adding.on)


def project(layer: nn.Linear, x: Tensor, training: bool) -> Tensor:
    """Apply a linear layer. One with fp8 products (see `flash_train.model.fp8`) has them in training only."""
    return layer(x) if training or isinstance(layer, Linear) else F.linear(x, layer.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """Adds an update to the residual stream. Returns the stream, and its norm once per use (see `ops.add_rms_norm`)."""

    def __init__(self, width: int, eps: float, *, uses: int) -> None:
        super().__init__(width, eps)
        self.uses = uses

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        return ops.add_rms_norm(x, update, self.weight, self.eps, self.uses)


class AttentionCall(nn.Module):
    """The attention operator without its projections. It is a module so that hooks can time it."""

    def __init__(self, dropout: float, backend: str) -> None:
        super().__init__()
        self.dropout, self.backend = dropout, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packing: Layout) -> Tensor:
        """Attend: q is (batch, seqlen, heads, head_dim), packed (total, heads, head_dim); k, v may have fewer heads."""
        spec = AttentionSpec(Causal(), dropout=self.dropout if self.training else 0.0)
        if isinstance(packing, SharedRow):
            attend = _attend_with_others
            if torch.compiler.is_compiling():  # the communication and its plan are no part of a compiled graph
                attend = torch.compiler.disable(attend)
            return attend(q, k, v, spec, packing, self.backend)
        return attention(q, k, v, spec, packing=packing, backend=self.backend)


def _attend_with_others(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, row: SharedRow, backend: str) -> Tensor:
    """Attend over a row that several ranks share; their generators have the same state."""
    rng = RngState(*draw_state(q.device)) if spec.dropout > 0 else None
    return shared_attention(q, k, v, spec, row, rng=rng, backend=backend)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and, if asked for, normalised queries and keys."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.call = AttentionCall(config.attention_dropout, backend)
        self.q = Linear(config.width, config.n_heads * config.head_dim)
        self.k = Linear(config.width, config.n_kv_heads * config.head_dim)
        self.v = Linear(config.width, config.n_kv_heads * config.head_dim)
        self.out = Linear(config.n_heads * config.head_dim, config.width)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Sequence[Tensor], cos: Tensor, sin: Tensor, packing: Layout, batch_size: int) -> Tensor:
        """Attend: x has three references to the normed input (tokens, width), for q, k and v.

        Their gradients are added in the kernel of the norm's backward.

        Without packing, the tokens are `batch_size` equal rows.
        """
        for_q, for_k, for_v = x
        q = project(self.q, for_q, self.training).view(-1, self.n_heads, self.head_dim)
        k = project(self.k, for_k, self.training).view(-1, self.n_kv_heads, self.head_dim)
        v = project(self.v, for_v, self.training).view(-1, self.n_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.apply_rotary(q, k, cos, sin)
        if packing is None:
            q, k, v = (t.unflatten(0, (batch_size, -1)) for t in (q, k, v))
        return project(self.out, self.call(q, k, v, packing).reshape(len(for_q), -1), self.training)


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_width)
        self.up = Linear(config.width, config.mlp_width)
        self.down: nn.Linear = SwiGLULinear(config.mlp_width, config.width)

    def forward(self, x: Sequence[Tensor], *, needs_value: bool = True) -> Tensor:
        """Return down(silu(gate(x)) · up(x)); x is (tokens, width) twice, for the gate and for up.

        Without `needs_value` only the gradients are right (see `ops.swiglu_linear`).
        """
        for_gate, for_up = x
        gate, up = project(self.gate, for_gate, self.training), project(self.up, for_up, self.training)
        if isinstance(self.down, SwiGLULinear):
            return self.down(gate, up, needs_value=needs_value)
        return project(self.down, ops.swiglu(gate, up), self.training)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both updates."""

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        self.residual_dropout = config.residual_dropout
        self.attention_norm = AddRMSNorm(config.width, config.norm_eps, uses=3)
        self.attention = Attention(config, backend)
        self.mlp_norm = AddRMSNorm(config.width, config.norm_eps, uses=2)
        self.mlp = SwiGLU(config)
        self.adding = Adding()
        for module in self.modules():
            if isinstance(module, Linear):
                module.adding = self.adding

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packing: Layout, batch_size: int, *, tiled: bool = False
    ) -> Tensor:
        """Run the block. With `tiled`, for a block that is recomputed, the MLP keeps its input only."""
        # Draw both masks before the attention. With memory=selective the recomputation skips the attention, so after it
        # the generator would not be in the state that it had in the forward.
        masks = [self._keep_mask(x, packing) for _ in range(2)]
        x, *normed = self.attention_norm(x)
        update = self._drop(self.attention(normed, cos, sin, packing, batch_size), masks[0])
        if tiled and not torch.compiler.is_compiling():
            x = x + update
            del update, normed
            return tiled_mlp(self._mlp_half, x, masks[1], [*self.mlp_norm.parameters(), *self.mlp.parameters()])
        x, *normed = self.mlp_norm(x, update)
        del update  # its memory is free for the MLP
        return x + self._drop(self.mlp(normed), masks[1])

    def _mlp_half(self, x: Tensor, mask: Tensor | None, needs_value: bool) -> tuple[Tensor, Tensor]:
        x, *normed = self.mlp_norm(x)
        return x, self._drop(self.mlp(normed, needs_value=needs_value), mask)

    def _keep_mask(self, x: Tensor, packing: Layout) -> Tensor | None:
        """Draw the mask of an update. A rank that has a part of a row draws the row's mask and takes its part."""
        if not self.training or self.residual_dropout == 0.0:
            return None
        row = packing if isinstance(packing, SharedRow) else None
        tokens = row.plan.seq_len if row else len(x)
        mask = torch.empty((tokens, x.shape[1]), dtype=torch.bool, device=x.device).bernoulli_(
            1 - self.residual_dropout
        )
        return row.own(mask) if row else mask

    def _drop(self, update: Tensor, mask: Tensor | None) -> Tensor:
        return update if mask is None else (update * mask) * (1 / (1 - self.residual_dropout))
