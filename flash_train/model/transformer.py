"""The decoder: tokens to logits, or to a loss without holding all logits at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_train.attention.backends import backend_names
from flash_train.attention.parallel import SharedRow
from flash_train.checks import check, check_name, within
from flash_train.model import ops
from flash_train.model.config import ModelConfig
from flash_train.model.layers import Block, Layout, Linear, RMSNorm
from flash_train.model.offload import HostInputs, blocks_on_host
from flash_train.model.recompute import check_memory_mode, first_kept, run_block
from flash_train.model.rope import rope_tables


class Transformer(nn.Module):
    """A pre-norm decoder in the Llama layout.

    Args:
        config: the shape.
        attention: the backend, one of `flash_train.attention.BACKENDS`.
        memory: what each block keeps for its backward. none: everything; selective: its input, and the attention's
            output and log-sum-exp; checkpoint: its input alone.
        keep: the share of the blocks, the last ones, that keep everything in every mode (see `first_kept`).
        offload: the share of the blocks, the first ones, whose inputs are in the host's memory until their backward
            (see `flash_train.model.offload`).

    Every call takes `tokens`, int64 (batch, seq). With `packing`, the batch is one stream of batch·seq tokens, cut into
    documents that do not see each other; without, each row is one causal document. `positions` int64 (batch, seq) count
    from each document's start; None computes them. If several ranks share the rows, `packing` is a `SharedRow`, and the
    tokens and positions are this rank's, (1, tokens).

    Raises:
        ValueError: an unknown backend or memory mode, or a share that is not in [0, 1].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: str = "auto",
        memory: str = "none",
        keep: float = 0.0,
        offload: float = 0.0,
    ) -> None:
        super().__init__()
        check_name("attention", attention, backend_names())  # not `BACKENDS`: a family may be registered later
        check_memory_mode(memory)
        check("memory.keep", keep, within(0, 1))
        check("memory.offload", offload, within(0, 1))
        self.config, self.attention, self.memory, self.keep, self.offload = config, attention, memory, keep, offload
        self.fp8: str | None = None  # the recipe, after `flash_train.model.fp8.to_fp8`
        self._host_inputs = HostInputs()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_embeddings else Linear(config.width, config.vocab_size)
        self.reset_parameters()

    def draw_weights(self) -> None:
        """Draw the same weights as the constructor.

        Like the constructor, it first draws the embedding's default weights, which advances the generator.
        """
        self.embedding.reset_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from normal(0, 1/√width).

        At width 2048 this is about the usual 0.02; a fixed 0.02 would keep small models from attending.

        Weights that write into the residual stream are smaller by √(2·n_layers), as in GPT-2 (Radford et al. 2019,
        2.3). An untied embedding is normal(0, 1), so that tokens stay distinct in the stream, to which every layer
        adds. Without this, small models do not learn associative recall.
        """
        std = self.config.width**-0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith(("attention.out", "mlp.down"))
                nn.init.normal_(module.weight, std=std / (2 * self.config.n_layers) ** 0.5 if writes_residual else std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.head is not None:
            nn.init.normal_(self.embedding.weight)

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size, width)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Layout = None) -> Tensor:
        """Return normalised hidden states (batch, seq, width), in autocast's dtype if autocast is on.

        Raises:
            ValueError: no tokens, or shapes that do not fit together. `forward` and `loss` raise it, too.
        """
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}: must be (batch, seq), both 1 or more")
        _check_shape("positions", positions, tokens)
        if positions is None:
            positions = _default_positions(tokens, packing)
        cos, sin = rope_tables(self.config, positions.reshape(-1))  # once for all layers
        x = self.embedding(tokens.reshape(-1))
        x = x.to(ops.compute_dtype(x))  # so the residual stream takes half the memory under autocast
        random = self.training and max(self.config.attention_dropout, self.config.residual_dropout) > 0
        first = first_kept(len(self.blocks), self.memory, self.keep)
        on_host = blocks_on_host(len(self.blocks), first, self.offload) if torch.is_grad_enabled() else 0
        for number, block in enumerate(self.blocks):
            memory = self.memory if number < first else "none"
            self._host_inputs.settle()
            with self._host_inputs.keeping(number, x) if number < on_host else nullcontext():
                x = run_block(
                    block, x, cos, sin, packing, len(tokens), tiled=memory != "none", memory=memory, random=random
                )
            if 0 < number <= on_host and x.requires_grad:
                self._host_inputs.fetch_before(number - 1, x)
        return self.norm(x).view(*tokens.shape, -1)

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, packing: Layout = None) -> Tensor:
        """Return logits (batch, seq, vocab_size). For training, `loss` needs far less memory."""
        return F.linear(self.hidden(tokens, positions=positions, packing=packing), self.head_weight)

    def loss(
        self, tokens: Tensor, labels: Tensor, *, positions: Tensor | None = None, packing: Layout = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies in nats (fp32 scalar), and the number of labels (int64 scalar).

        `labels` int64 (batch, seq) are the next tokens; -100 is ignored.
        """
        _check_shape("labels", labels, tokens)
        hidden = self.hidden(tokens, positions=positions, packing=packing)
        labels = labels.reshape(-1)
        total = ops.linear_cross_entropy(hidden.view(len(labels), -1), self.head_weight, labels)
        return total, (labels != ops.IGNORE_INDEX).sum()

    @contextmanager
    def adding_gradients(self) -> Iterator[None]:
        """Let forwards in this context have a backward that adds to `weight.grad` within its matrix products.

        This saves a pass over the gradients in each micro-batch of a step but the first. It is for a plain
        `loss.backward()` on one device: `torch.autograd.grad` would not get the gradients, and
        `DistributedDataParallel` and FSDP would not see them. Weights with hooks, and blocks that are recomputed
        (outside of this context), are left out.
        """
        first = first_kept(len(self.blocks), self.memory, self.keep)
        kept = [cast(Block, block).adding for block in self.blocks[first:]]
        for adding in kept:
            adding.on = True
        try:
            yield
        finally:
            for adding in kept:
                adding.on = False

    def num_parameters(self) -> int:
        """Count all weights; tied embeddings are counted once."""
        return sum(p.numel() for p in self.parameters())

    def model_flops(self, n_tokens: int, pairs: int) -> int:
        """Return the FLOPs of a forward and backward over `n_tokens`, with `pairs` query-key pairs in attention.

        It counts 6 per weight and token, without the embedding, which does not multiply, and 12 per pair, head and
        element of a head. Recomputation is not counted: this is the numerator of the model-FLOP utilisation.
        """
        c = self.config
        return 6 * c.matmul_parameters * n_tokens + 12 * c.n_layers * c.n_heads * c.head_dim * pairs


def _check_shape(name: str, given: Tensor | None, tokens: Tensor) -> None:
    """Raise ValueError for a tensor that does not have a value for each token."""
    if given is not None and given.shape != tokens.shape:
        raise ValueError(f"{name} has shape {tuple(given.shape)}: must be {tuple(tokens.shape)}, as tokens")


def _default_positions(tokens: Tensor, packing: Layout) -> Tensor:
    if isinstance(packing, SharedRow):
        raise ValueError("positions=None: a rank that has a part of a row must give its tokens' positions")
    if packing is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    index = torch.arange(tokens.numel(), device=tokens.device)
    document = torch.searchsorted(packing.cu_seqlens_q[1:], index.to(packing.cu_seqlens_q.dtype), right=True)
    return (index - packing.cu_seqlens_q[document]).view(tokens.shape)
