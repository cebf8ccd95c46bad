"""The memory of attention in a training step: from a layer's queries, keys and values to its output, and back."""

from flash_train.attention.dense.chunked import KEY_CHUNK, QUERY_CHUNK
from flash_train.attention.kernels.families import is_own
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.step import WIDTHS, Step

#: what a layer's attention has for its backward: what it was given, and what it made
SAVED = (
    *("q", "k", "v", "raw q", "raw k", "rstd q", "rstd k", "out", "lse", "joined"),
    *("pairs", "dropped pairs", "scaled q and k"),
)


class AttentionWalk:
    """The part of a step's walk that is attention's, entered into the step's ledger under names that begin with the
    layer's number. Sizes are in elements unless they are called bytes."""

    def __init__(self, step: Step, ledger: Ledger) -> None:
        m = step.model
        self.step, self.model, self.ledger = step, m, ledger
        _, self.e = WIDTHS[step.precision]
        self.heads = step.tokens * m.n_heads * m.head_dim
        self.kv_heads = step.tokens * m.n_kv_heads * m.head_dim

    # -- forward

    def forward(self, layer: int) -> None:
        """From `q`, `k` and `v`, as their products left them, to `out`."""
        if self.model.qk_norm:
            self.head_norms(layer)
        if not self.step.fused:
            self.rotate(layer)
        self.attend(layer)

    def head_norms(self, layer: int) -> None:
        m = self.model
        for name, size, heads in (("q", self.heads, m.n_heads), ("k", self.kv_heads, m.n_kv_heads)):
            self.ledger.rename(f"{layer}.{name}", f"{layer}.raw {name}")
            self.ledger.hold(f"{layer}.{name}", "attention", self.e * size)
            factor = 1 if self.step.fused else 1 + self.e * m.head_dim / 4  # PyTorch's own keeps the scaled rows
            self.ledger.hold(f"{layer}.rstd {name}", "attention", 4 * self.step.tokens * heads * factor)

    def rotate(self, layer: int) -> None:
        """PyTorch's rotary embedding makes new tensors; what it was given stays only if something saved it."""
        for name, size in (("q", self.heads), ("k", self.kv_heads)):
            self.ledger.hold(f"{layer}.rotated {name}", "attention", self.e * size)
            self.ledger.pass_by(f"{layer}.halves", "attention", 4 * size)
            self.ledger.drop(f"{layer}.{name}")
            self.ledger.rename(f"{layer}.rotated {name}", f"{layer}.{name}")

    def attend(self, layer: int) -> None:
        hold, e, m = self.ledger.hold, self.e, self.model
        if self.step.attention == "standard":
            pairs, document = self.pairs()
            hold(f"{layer}.pairs", "attention", e * pairs)
            dropout = pairs if m.attention_dropout else 0
            hold(f"{layer}.dropped pairs", "attention", dropout)
            mask = max(self.step.documents) ** 2
            self.ledger.pass_by(f"{layer}.scores", "attention workspace", e * document + mask)
        if self.step.by_formula:  # weights, which of them are kept, what is left of them; scaled q and k: all in fp32
            hold(f"{layer}.pairs", "attention", 3 * 4 * self.pairs()[0])
            hold(f"{layer}.scaled q and k", "attention", (2 if e == 4 else 3) * 4 * self.heads)
        self.ledger.pass_by(f"{layer}.chunk", "attention workspace", self.chunk())
        grouped = self.step.attention == "sdpa" and not self.step.fused and m.n_heads != m.n_kv_heads
        if grouped:  # PyTorch's attention on a CPU gets keys and values once per head
            self.ledger.drop(f"{layer}.k", f"{layer}.v")
            for name in ("k", "v"):
                hold(f"{layer}.{name}", "attention", e * self.heads)
        if f"{layer}.out" not in self.ledger.held:
            hold(f"{layer}.out", "attention", e * self.heads)
            hold(f"{layer}.lse", "attention", 4 * self.step.tokens * m.n_heads)
        if not self.packed_kernel and self.step.attention != "chunked":  # a document at a time, kept, then joined
            hold(f"{layer}.joined", "attention", e * self.heads)

    def keep(self, layer: int) -> None:
        """`memory=selective` keeps the results of a fused attention's operator."""
        if self.step.attention not in ("standard", "chunked") and not self.step.by_formula:
            for name in ("out", "lse"):
                self.ledger.rename(f"{layer}.{name}", f"{layer}.kept {name}")

    def give_back(self, layer: int) -> None:
        """What was kept, to a forward that runs again all but the operator."""
        for name in ("out", "lse"):
            self.ledger.rename(f"{layer}.kept {name}", f"{layer}.{name}")

    # -- backward

    def backward(self, layer: int) -> None:
        """From `d mixed`, the gradient of the output, to `d q`, `d k` and `d v`."""
        ledger, e, m = self.ledger, self.e, self.model
        kv = self.ledger.size_of(f"{layer}.k")
        ledger.drop(f"{layer}.joined")
        if self.step.by_formula:
            ledger.pass_by(f"{layer}.d pairs", "attention workspace", 4 * self.pairs()[1])
        ledger.hold(f"{layer}.d q", "attention", e * self.heads)
        for name in ("k", "v"):
            ledger.hold(f"{layer}.d {name}", "attention", kv)
        if self.step.attention == "standard":  # beside them the output's gradient, of the queries that see something
            _, document = self.pairs()
            widened = document if m.attention_dropout and not self.step.fused else 0  # a CPU's copy of the dropout mask
            ledger.pass_by(f"{layer}.d pairs", "attention workspace", e * (document + widened + self.heads))
        rows = 2 if is_own(self.step.attention) else 1  # delta, and the log-sum-exp in base 2
        rows *= self.step.tokens * m.n_heads
        if self.step.attention == "sdpa" and self.step.fused:  # FlashAttention-2 adds up the queries' gradient in fp32
            rows += self.heads
        if self.step.accumulates_dq:  # in tiles of 64 or 128 columns
            rows += self.heads * (64 if m.head_dim <= 64 else 128) // m.head_dim
        ledger.hold(f"{layer}.rows", "attention workspace", 4 * rows + self.chunk())
        ledger.drop(
            *(f"{layer}.{name}" for name in ("q", "k", "v", "out", "lse", "pairs", "dropped pairs", "scaled q and k"))
        )
        ledger.drop(f"{layer}.rows", f"{layer}.d mixed", f"{layer}.masked 1")
        if m.qk_norm:
            self.head_norms_backward(layer)

    def head_norms_backward(self, layer: int) -> None:
        ledger = self.ledger
        for name in ("q", "k"):
            ledger.hold(f"{layer}.d raw {name}", "attention", ledger.size_of(f"{layer}.d {name}"))
            ledger.drop(f"{layer}.d {name}", f"{layer}.raw {name}", f"{layer}.rstd {name}")
            ledger.rename(f"{layer}.d raw {name}", f"{layer}.d {name}")

    # -- what the backends differ in

    @property
    def packed_kernel(self) -> bool:
        """Whether one kernel takes all documents: ours does; PyTorch's if they are equal, or packed on CUDA."""
        if self.step.attention != "sdpa":
            return is_own(self.step.attention) and self.step.fused
        if self.step.whole_rows or len(set(self.step.lengths or ())) == 1:
            return True
        m = self.model
        return self.step.fused and self.e == 2 and not m.attention_dropout and m.head_dim % 8 == 0

    def pairs(self) -> tuple[int, int]:
        """Elements of all score matrices that one layer keeps, and of the largest one."""
        squares = [n * n for n in self.step.documents]
        return self.model.n_heads * sum(squares), self.model.n_heads * max(squares)

    def chunk(self) -> int:
        """Bytes of what chunked attention holds of a chunk: logits and weights before and after a change, in fp32; with
        dropout which of them are kept, and what is left."""
        if self.step.attention != "chunked":
            return 0
        longest = max(self.step.documents)
        each = 3 * 4 + (4 + 1 if self.model.attention_dropout else 0)
        return each * self.step.batch_size * self.model.n_heads * min(QUERY_CHUNK, longest) * min(KEY_CHUNK, longest)
