"""The memory of attention in a training step: from a layer's queries, keys and values to its output, and back."""

from flash_train.attention.dense.chunked import KEY_CHUNK, QUERY_CHUNK
from flash_train.attention.kernels.families import FAMILIES, is_own
from flash_train.profiling.memory.module_walks import ModuleWalk


class AttentionWalk(ModuleWalk):
    """Attention by itself, between its projections."""

    def begin(self) -> None:
        """Hold what lives as long as the batch."""

    # -- forward

    def forward(self, layer: int) -> None:
        """Walk from `q`, `k` and `v`, as their products left them, to `out`."""
        if self.model.qk_norm:
            self._norm_heads(layer)
        if not self.step.fused:
            self._rotate(layer)
        self._attend(layer)

    def after_forward(self, layer: int) -> None:
        """Release what lives until attention's last projection has run."""

    def forget(self, layer: int) -> None:
        """Release the saved tensors, since the forward will run again; `memory=selective` keeps `out` and `lse`."""
        if self.keeps_results:
            for name in ("out", "lse"):
                self.ledger.rename(f"{layer}.{name}", f"{layer}.kept {name}")
        kept = ("out", "lse") if self.keeps_results else ()
        names = ["q", "k", "v", "out", "lse", *self._pair_names, *(["joined"] if self.joins_documents else [])]
        if self.model.qk_norm:
            names += ["raw q", "raw k", "rstd q", "rstd k"]
        self.ledger.release(*(f"{layer}.{name}" for name in names if name not in kept))

    def restore(self, layer: int) -> None:
        """Rename the kept results before the forward runs again, so that it uses them."""
        if self.keeps_results:
            for name in ("out", "lse"):
                self.ledger.rename(f"{layer}.kept {name}", f"{layer}.{name}")

    def _norm_heads(self, layer: int) -> None:
        m = self.model
        for name, size, heads in (("q", self.heads, m.n_heads), ("k", self.kv_heads, m.n_kv_heads)):
            self.ledger.rename(f"{layer}.{name}", f"{layer}.raw {name}")
            self.ledger.hold(f"{layer}.{name}", "attention", self.activation_bytes * size)
            # PyTorch's own norm keeps the scaled rows.
            factor = 1 if self.step.fused else 1 + self.activation_bytes * m.head_dim / 4
            self.ledger.hold(f"{layer}.rstd {name}", "attention", 4 * self.step.tokens * heads * factor)

    def _rotate(self, layer: int) -> None:
        """Rotate into new tensors, as PyTorch does; the inputs stay only if something saved them."""
        for name, size in (("q", self.heads), ("k", self.kv_heads)):
            self.ledger.hold(f"{layer}.rotated {name}", "attention", self.activation_bytes * size)
            self.ledger.hold_briefly(f"{layer}.halves", "attention", 4 * size)
            self.ledger.release(f"{layer}.{name}")
            self.ledger.rename(f"{layer}.rotated {name}", f"{layer}.{name}")

    def _attend(self, layer: int) -> None:
        hold, e, m = self.ledger.hold, self.activation_bytes, self.model
        if self.step.attention == "standard":
            pairs, document = self.pairs()
            hold(f"{layer}.pairs", "attention", e * pairs)
            hold(f"{layer}.dropped pairs", "attention", pairs if m.attention_dropout else 0)
            mask = max(self.step.documents) ** 2
            self.ledger.hold_briefly(f"{layer}.scores", "attention workspace", e * document + mask)
        # The weights, the dropout mask, the dropped weights, and scaled q and k are in fp32.
        if self.step.holds_score_matrices:
            hold(f"{layer}.pairs", "attention", 3 * 4 * self.pairs()[0])
            hold(f"{layer}.scaled q and k", "attention", (2 if e == 4 else 3) * 4 * self.heads)
        self.ledger.hold_briefly(f"{layer}.chunk", "attention workspace", self.chunk())
        grouped = self.step.attention == "sdpa" and not self.step.fused and m.n_heads != m.n_kv_heads
        if grouped:  # PyTorch's attention on a CPU gets keys and values once per head
            self.ledger.release(f"{layer}.k", f"{layer}.v")
            for name in ("k", "v"):
                hold(f"{layer}.{name}", "attention", e * self.heads)
        if f"{layer}.out" not in self.ledger.held:  # otherwise `restore` has renamed the kept one
            hold(f"{layer}.out", "attention", e * self.heads)
            hold(f"{layer}.lse", "attention", 4 * self.step.tokens * m.n_heads)
        if self.joins_documents:
            hold(f"{layer}.joined", "attention", e * self.heads)

    # -- backward

    def backward(self, layer: int) -> None:
        """Walk from `d mixed`, the gradient of the output, to `d q`, `d k` and `d v`."""
        ledger, e, m = self.ledger, self.activation_bytes, self.model
        kv = ledger.size_of(f"{layer}.k")
        if self.step.holds_score_matrices:
            ledger.hold_briefly(f"{layer}.d pairs", "attention workspace", 4 * self.pairs()[1])
        ledger.hold(f"{layer}.d q", "attention", e * self.heads)
        for name in ("k", "v"):
            ledger.hold(f"{layer}.d {name}", "attention", kv)
        if self.step.attention == "standard":  # includes the output's gradient of queries that attend to some key
            _, document = self.pairs()
            widened = document if m.attention_dropout and not self.step.fused else 0  # a CPU's copy of the dropout mask
            ledger.hold_briefly(f"{layer}.d pairs", "attention workspace", e * (document + widened + self.heads))
        rows = self.backward_rows(self.step.tokens, m.n_heads, self._entries)
        ledger.hold(f"{layer}.rows", "attention workspace", 4 * rows + self.chunk())
        ledger.release(*(f"{layer}.{name}" for name in ("q", "k", "v", "out", "lse", *self._pair_names)))
        ledger.release(f"{layer}.rows", f"{layer}.d mixed")
        if m.qk_norm:
            self._norm_heads_backward(layer)

    def backward_rows(self, queries: int, heads: int, entries: int) -> int:
        """Return the fp32 numbers that a kernel needs for its backward.

        Args:
            queries, heads, entries: of a packed call.
        """
        head_dim = self.model.head_dim
        columns = 2 if is_own(self.step.attention) else 1  # delta, and in ours the log-sum-exp in base 2
        if self.step.attention == "sdpa" and self.step.fused:  # FlashAttention-2 has an accumulator for dQ in fp32
            columns += head_dim
        if self.step.accumulates_dq:  # in tiles of 64 or 128 columns
            columns += 64 if head_dim <= 64 else 128
            queries = FAMILIES[self.step.family].accumulated_rows(queries, entries)
        return queries * heads * columns

    def _norm_heads_backward(self, layer: int) -> None:
        ledger = self.ledger
        for name in ("q", "k"):
            ledger.hold(f"{layer}.d raw {name}", "attention", ledger.size_of(f"{layer}.d {name}"))
            ledger.release(f"{layer}.d {name}", f"{layer}.raw {name}", f"{layer}.rstd {name}")
            ledger.rename(f"{layer}.d raw {name}", f"{layer}.d {name}")

    # -- how the backends differ

    @property
    def _entries(self) -> int:
        """Entries of the call, empty ones included."""
        return self.step.entries

    @property
    def keeps_results(self) -> bool:
        """Whether `memory=selective` keeps the output: fused attention is one operator, whose results it saves."""
        fused = self.step.attention not in ("standard", "chunked") and not self.step.holds_score_matrices
        return self.step.memory == "selective" and fused

    @property
    def packed_kernel(self) -> bool:
        """Whether one kernel takes all documents: ours does; PyTorch's if lengths are equal, or packed on CUDA."""
        if self.step.attention != "sdpa":
            return is_own(self.step.attention) and self.step.fused
        if self.step.whole_rows or len(set(self.step.lengths or ())) == 1:
            return True
        m = self.model
        return self.step.fused and self.activation_bytes == 2 and not m.attention_dropout and m.head_dim % 8 == 0

    @property
    def joins_documents(self) -> bool:
        """Whether the documents' outputs are computed one at a time, kept, and concatenated."""
        return not self.packed_kernel and self.step.attention != "chunked"

    @property
    def _pair_names(self) -> tuple[str, ...]:
        """Tensors that the backward needs only in these backends; `pairs` have an element per query and key."""
        if self.step.attention == "standard":
            return ("pairs", "dropped pairs")
        return ("pairs", "scaled q and k") if self.step.holds_score_matrices else ()

    def pairs(self) -> tuple[int, int]:
        """Return the elements of all score matrices that one layer keeps, and of the largest one."""
        squares = [n * n for n in self.step.documents]
        return self.model.n_heads * sum(squares), self.model.n_heads * max(squares)

    def chunk(self) -> int:
        """Return the bytes that chunked attention holds for a chunk.

        These are logits and weights before and after a change, in fp32; with dropout also its mask and the dropped
        weights.
        """
        if self.step.attention != "chunked":
            return 0
        longest = max(self.step.documents)
        each = 3 * 4 + (4 + 1 if self.model.attention_dropout else 0)
        return each * self.step.batch_size * self.model.n_heads * min(QUERY_CHUNK, longest) * min(KEY_CHUNK, longest)
