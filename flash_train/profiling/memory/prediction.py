"""The memory of a training step, from its configuration alone.

The step is walked through as PyTorch runs it, and every tensor that matters is entered into a ledger when it comes to
be and struck out when it goes: when its name in Python ends, or when the backward has used what autograd saved. There
is nothing in it but shapes, sizes of dtypes, and this order of events; no number was fitted.

`Step.fused` is the path on CUDA (kernels for norm, rotary, SwiGLU and linear cross entropy), else PyTorch's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flash_train.model.ops import CHUNK_TOKENS, MAX_LOGIT_TOKENS
from flash_train.profiling.memory.attention_prediction import SAVED, AttentionWalk
from flash_train.profiling.memory.ledger import Ledger, Moment
from flash_train.profiling.memory.step import WIDTHS, Step

KINDS = (
    "weights", "gradients", "optimizer state", "autocast copies", "residual stream", "norms", "attention", "mlp",
    "attention workspace", "logits and loss", "batch and tables", "matrix-product workspace",
)  # fmt: skip
OPTIMIZER_BLOCK = 2048  # elements of a weight that a program of the optimizer's kernel takes
# An embedding's gradient on CUDA: PyTorch sorts more tokens than these, and adds up so many of a kind at once, in fp32
EMBEDDING_SORTS, EMBEDDING_ADDS = 3072, 10
PHASES = ("forward", "loss", "backward", "step")


@dataclass(frozen=True)
class Prediction:
    """Bytes. `peak` is the fullest moment of the step, `phases` that of each phase, `per_layer` what a block keeps
    between its forward and its backward, `moments` all of them, for a picture."""

    peak: Moment
    phases: dict[str, Moment]
    per_layer: int
    moments: list[tuple[str, Moment]]

    @property
    def peak_bytes(self) -> int:
        return self.peak.total


def predict(step: Step) -> Prediction:
    """The memory of a step after the first, which has optimizer state; of several micro-batches, that of one after the
    first, when gradients do, too."""
    walk = _Walk(step)
    walk.run()
    return Prediction(
        walk.ledger.peak(), {name: walk.ledger.peak(name) for name in PHASES}, walk.per_layer, walk.ledger.moments
    )


class _Walk:
    """One optimizer step of the model, tensor by tensor. Sizes are in elements unless they are called bytes."""

    def __init__(self, step: Step) -> None:
        m = step.model
        self.step, self.model, self.ledger = step, m, Ledger()
        self.attention = AttentionWalk(step, self.ledger)
        self.w, self.e = WIDTHS[step.precision]
        self.mixed = self.w != self.e  # autocast
        self.widens = self.e < 4 and not step.fused
        tokens = step.tokens
        self.stream = tokens * m.width
        self.hidden = tokens * m.mlp_width
        attention, kv = m.width * m.n_heads * m.head_dim, m.width * m.n_kv_heads * m.head_dim
        self.linears = {
            "q": attention, "k": kv, "v": kv, "out": attention,
            "gate": m.width * m.mlp_width, "up": m.width * m.mlp_width, "down": m.width * m.mlp_width,
        }  # fmt: skip
        self.per_layer = 0

    def run(self) -> None:
        self.begin()
        self.ledger.phase = "forward"
        self.forward()
        self.ledger.phase = "loss"
        self.loss()
        self.ledger.phase = "backward"
        self.backward()
        self.ledger.phase = "step"
        self.ledger.pass_by("norms of the gradients", "optimizer state", 4 * len(self.linears) * self.model.n_layers)

    def begin(self) -> None:
        m, hold = self.model, self.ledger.hold
        self.ledger.phase = "forward"
        hold("weights", "weights", self.w * m.num_parameters)
        hold("optimizer", "optimizer state", 2 * self.w * m.num_parameters)
        if self.step.fused:  # two int32 a block: whose it is, and which
            hold("optimizer's blocks", "optimizer state", 2 * 4 * m.num_parameters // OPTIMIZER_BLOCK)
        if self.step.accumulate > 1:
            hold("gradients", "gradients", self.w * m.num_parameters)
        hold("workspace", "matrix-product workspace", self.step.workspace)
        hold("batch", "batch and tables", 3 * 8 * self.step.tokens)  # tokens, labels, positions
        hold("tables", "batch and tables", 2 * 4 * self.step.tokens * m.head_dim // 2)  # cosines and sines

    # -- forward

    def forward(self) -> None:
        ledger = self.ledger
        ledger.hold("x0", "residual stream", self.e * self.stream)
        if self.mixed:
            ledger.pass_by("embedding in fp32", "residual stream", self.w * self.stream)
        for layer in range(self.model.n_layers):
            before = sum(ledger.parts.values())
            self.block(layer, saves=self.step.memory == "none")
            if layer == 0:
                copies = ledger.parts.get("autocast copies", 0)
                self.per_layer = sum(ledger.parts.values()) - copies - before

    def block(self, layer: int, *, saves: bool) -> None:
        """A block's forward; `saves`: autograd keeps what its backward needs, else all ends with its name."""
        hold, e = self.ledger.hold, self.e

        def ends(*names: str) -> None:
            if not saves:
                self.ledger.drop(*(f"{layer}.{name}" for name in names))

        if self.model.residual_dropout:
            for i in (1, 2):
                hold(f"{layer}.mask{i}", "residual stream", self.stream)
        self.norm(f"{layer}.norm1")

        def product(weight: str, result: str, kind: str, size: int) -> None:
            """Of a weight; under autocast of its copy in 16 bits, made for each product (Lightning caches none)."""
            copy = f"copy {layer}.{weight}"
            hold(copy, "autocast copies", e * self.linears[weight] if self.mixed else 0)
            hold(f"{layer}.{result}", kind, e * size)
            if not saves:
                self.ledger.drop(copy)

        for name in ("q", "k", "v"):
            product(name, name, "attention", self.attention.heads if name == "q" else self.attention.kv_heads)
        self.attention.forward(layer)
        product("out", "mixed", "attention", self.stream)
        if self.step.memory == "selective" and not saves:
            self.attention.keep(layer)
        ends(*SAVED)
        ends("norm1", "norm1 rstd", "norm1 scaled", "norm1 wide")
        self.add(f"{layer}.middle", f"{layer}.mixed", normed=f"{layer}.norm2")
        for name in ("gate", "up"):
            product(name, name, "mlp", self.hidden)
        if not self.step.fused:
            hold(f"{layer}.silu", "mlp", e * self.hidden)
        hold(f"{layer}.product", "mlp", e * self.hidden)
        ends("silu")
        product("down", "added", "mlp", self.stream)
        if self.step.fused:  # computed again in the backward
            self.ledger.drop(f"{layer}.product")
        ends("gate", "up", "product", "norm2", "norm2 rstd", "norm2 scaled", "norm2 wide")
        self.add(f"x{layer + 1}", f"{layer}.added")
        ends("middle", "mask1", "mask2")
        if self.widens:  # the norms saved copies in fp32 in the stream's place
            self.ledger.drop(f"{layer}.middle", f"x{layer}" if self.step.memory == "none" else "")

    def add(self, name: str, update: str, *, normed: str | None = None) -> None:
        """Onto the residual stream, and its norm behind it; with dropout the update is masked and scaled first."""
        if self.model.residual_dropout:
            for i in (1, 2):
                self.ledger.hold(f"{update} {i}", "residual stream", self.e * self.stream)
        in_norm = normed is not None and self.step.fused  # by its kernel
        self.ledger.hold(name, "norms" if in_norm else "residual stream", self.e * self.stream)
        if normed and in_norm:
            self.norm(normed)
        self.ledger.drop(update, f"{update} 1", f"{update} 2")
        if normed and not in_norm:
            self.norm(normed)

    def norm(self, name: str) -> None:
        """Its result, and what it saves beside its input: a number per row; PyTorch's own also the scaled rows."""
        hold = self.ledger.hold
        hold(name, "norms", self.e * self.stream)
        hold(f"{name} rstd", "norms", 4 * self.step.tokens)
        if not self.step.fused:
            hold(f"{name} scaled", "norms", self.e * self.stream)
            if self.widens:
                hold(f"{name} wide", "norms", 4 * self.stream)
            self.ledger.pass_by(f"{name} squared", "norms", 4 * self.stream)

    # -- loss

    def loss(self) -> None:
        ledger, m, e = self.ledger, self.model, self.e
        self.norm("final")
        head = m.vocab_size * m.width
        if not self.step.fused:
            self.chunk_of_logits("forward")
            return
        kind, chunk = "logits and loss", min(self.step.tokens, MAX_LOGIT_TOKENS)
        ledger.hold("losses", kind, 4 * self.step.tokens)
        ledger.hold("gradient of the hidden states", kind, e * self.stream)
        ledger.hold("sum of the head's gradient", kind, 4 * head)
        ledger.hold("copy of the head", kind, e * head if self.mixed else 0)
        ledger.pass_by("logits", kind, e * chunk * m.vocab_size)
        if self.w < 4:  # else the sum is the gradient
            ledger.pass_by("gradient of the head", kind, self.w * head)
        ledger.drop("losses", "sum of the head's gradient", "copy of the head")
        ledger.hold("gradient of the head", kind, self.w * head)
        ledger.drop("final")

    def chunk_of_logits(self, phase: str) -> None:
        """PyTorch's way: a chunk's logits at a time, computed again in the backward."""
        size = min(CHUNK_TOKENS, self.step.tokens) * self.model.vocab_size
        copies = (2 if phase == "forward" else 3) * 4  # logits, log-softmax, its gradient: fp32
        head = self.model.vocab_size * self.model.width if self.mixed and phase == "backward" else 0  # in 16 bits
        self.ledger.pass_by("logits", "logits and loss", copies * size + self.e * head)

    # -- backward

    def backward(self) -> None:
        ledger, m, e = self.ledger, self.model, self.e
        head = m.vocab_size * m.width
        if self.step.fused:
            self.gradient("head", head, ready=True)
            ledger.drop("gradient of the head")
        else:
            ledger.hold("gradient of the hidden states", "logits and loss", e * self.stream)
            self.chunk_of_logits("backward")
            self.gradient("head", head)
            ledger.pass_by("its pieces joined", "logits and loss", e * self.stream)
        if m.tied_embeddings and self.step.accumulate > 1:  # the two are added up before they meet what is there
            ledger.hold("gradient that waits for the embedding's", "gradients", self.w * head)
        ledger.drop("final")
        self.norm_backward("final", ["gradient of the hidden states"], f"x{m.n_layers}")
        ledger.hold("dx", "norms" if self.step.fused else "residual stream", e * self.stream)
        for layer in reversed(range(m.n_layers)):
            self.block_backward(layer)
        if self.mixed:
            ledger.hold("dx in fp32", "residual stream", self.w * self.stream)
            ledger.drop("dx")
        ledger.drop("tables")
        if self.step.fused and self.step.tokens > EMBEDDING_SORTS:
            rows = self.step.tokens // EMBEDDING_ADDS + min(self.step.tokens, m.vocab_size)
            ledger.hold("sums for the embedding", "gradients", 4 * rows * m.width)
        if m.tied_embeddings:
            ledger.pass_by("embedding", "gradients", self.w * head)
        else:
            self.gradient("embedding", head, ready=True)
        ledger.drop("dx", "dx in fp32", "gradient that waits for the embedding's", "sums for the embedding")

    def block_backward(self, layer: int) -> None:
        ledger, e, fused = self.ledger, self.e, self.step.fused
        if self.step.memory != "none":
            self.attention.give_back(layer)
            self.block(layer, saves=True)
            ledger.drop(f"x{layer + 1}")

        def held(name: str, kind: str, size: int) -> None:
            ledger.hold(f"{layer}.{name}", kind, e * size)

        def done(*names: str) -> None:
            ledger.drop(*(f"{layer}.{name}" for name in names))

        self.through_dropout(layer, "2")
        held("d product", "mlp", self.hidden)
        self.weight_gradient(layer, "down", "product", *(["d product"] if fused else []))  # fused, the one in the other
        if not fused:
            held("d silu", "mlp", self.hidden)
            held("d up", "mlp", self.hidden)
            done("silu", "up", "d product")
            held("d gate", "mlp", self.hidden)
            done("d silu", "gate")
        done("d product")
        for name in ("up", "gate"):  # their gradients lie where these were
            held(f"d norm2 by {name}", "norms", self.stream)
            self.weight_gradient(layer, name, name, f"d {name}", *(["norm2"] if name == "gate" else []))
            if name == "gate" and not fused:  # added to that by up; the kernel of the norm takes both
                done("d norm2 by gate")
        self.norm_backward(
            f"{layer}.norm2", [f"{layer}.d norm2 by {name}" for name in ("up", "gate")], f"{layer}.middle"
        )
        self.through_dropout(layer, "1")
        held("d mixed", "attention", self.attention.heads)
        self.weight_gradient(layer, "out", "joined")
        self.attention.backward(layer)
        for name in ("v", "k", "q"):
            held(f"d norm1 by {name}", "norms", self.stream)
            self.weight_gradient(layer, name, f"d {name}", *(["norm1"] if name == "q" else []))
            if name != "v" and not fused:
                done(f"d norm1 by {name}")
        by = [f"{layer}.d norm1 by {name}" for name in ("v", "k", "q")]
        self.norm_backward(f"{layer}.norm1", by, f"x{layer}")
        ledger.drop(*[name for name in ledger.held if name.startswith(f"{layer}.")])

    def through_dropout(self, layer: int, which: str) -> None:
        if self.model.residual_dropout:
            for name in ("scaled", "masked"):
                self.ledger.hold(f"{layer}.{name} {which}", "residual stream", self.e * self.stream)
            self.ledger.drop(f"{layer}.scaled {which}", f"{layer}.mask{which}")

    def norm_backward(self, name: str, gradients: Sequence[str], of: str) -> None:
        """From the gradients of its result to that of its input."""
        ledger, kind = self.ledger, "norms"
        ledger.hold(f"d {name}", kind, self.e * self.stream)
        if not self.step.fused:  # product by product: with the weight, with the scaled rows, and through the mean
            wide = f"d {name} in fp32"
            ledger.pass_by(f"d {name} of its weight", kind, self.e * self.stream)
            ledger.drop(*gradients, f"{name} scaled")
            ledger.hold(wide, kind, (4 if self.widens else 0) * self.stream)
            ledger.pass_by(f"{wide} by rows", kind, 2 * 4 * self.stream)
            ledger.drop(wide)
        ledger.drop(of, *gradients, *(f"{name} {part}" for part in ("rstd", "scaled", "wide")), f"d {name}")

    def weight_gradient(self, layer: int, name: str, *uses: str) -> None:
        """Of a product, whose input and whose result's gradient, `uses`, end before the weight's is widened."""
        ends = [f"copy {layer}.{name}", *(f"{layer}.{used}" for used in uses)]
        self.gradient(f"{layer}.weights of {name}", self.linears[name], ends)

    def gradient(self, name: str, size: int, ends: Sequence[str] = (), *, ready: bool = False) -> None:
        """A weight's gradient; under autocast it comes in 16 bits first. `ready`: it is of the weight's dtype."""
        comes_as = "gradient in 16 bits" if self.mixed and not ready else f"gradient {name}"
        self.ledger.hold(comes_as, "gradients", (self.e if self.mixed and not ready else self.w) * size)
        self.ledger.drop(*ends)
        if comes_as != f"gradient {name}":
            self.ledger.hold(f"gradient {name}", "gradients", self.w * size)
            self.ledger.drop(comes_as)
        if self.step.accumulate > 1:  # it is added to what is there
            self.ledger.drop(f"gradient {name}")
