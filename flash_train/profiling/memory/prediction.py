"""The memory of a training step, from its configuration alone.

The prediction walks through the step as PyTorch runs it. Every tensor that matters enters a ledger when it is allocated
and leaves it when it is freed: when its last Python reference goes, or when the backward has used it. The prediction
uses only shapes, sizes of dtypes, and this order of events; no number was fitted.

With `Step.fused` it follows the path on CUDA (kernels for norm, rotary, SwiGLU and linear cross entropy), otherwise
PyTorch's own operations.
"""

from dataclasses import dataclass, replace

from flash_train.model.kernels.common import MAX_LOGIT_TOKENS
from flash_train.model.ops import CHUNK_TOKENS
from flash_train.profiling.memory.attention_walk import AttentionWalk
from flash_train.profiling.memory.ledger import Ledger, Moment
from flash_train.profiling.memory.module_walks import LinearWalk, MLPWalk, ModuleWalk, NormWalk, ResidualWalk
from flash_train.profiling.memory.shared_attention_walk import SharedAttentionWalk
from flash_train.profiling.memory.step import Step
from flash_train.profiling.memory.tiled_mlp_walk import TiledMLPWalk
from flash_train.profiling.memory.weights_walk import OptimizerState, ShardedWeights, WholeWeights

KINDS = (
    "weights", "gradients", "optimizer state", "autocast copies", "residual stream", "norms", "attention", "mlp",
    "attention workspace", "logits and loss", "batch and tables", "matrix-product workspace", "gathered weights",
    "gradients to reduce", "exchanged heads",
)  # fmt: skip
# An embedding's gradient on CUDA: with more tokens than the first number, PyTorch sorts them and adds up rows of the
# same token in fp32; the second number is how many rows it adds at once.
EMBEDDING_SORT_TOKENS, EMBEDDING_ROWS_PER_SUM = 3072, 10
PHASES = ("forward", "loss", "backward", "step")


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a step, in bytes.

    `peak` is the fullest moment of the step, `phases` has the fullest of each phase, `per_layer` is what a block keeps
    between its forward and its backward, and `moments` has all moments, for a picture. `host_bytes` is what a device's
    process keeps in the host's memory, pinned.
    """

    peak: Moment
    phases: dict[str, Moment]
    per_layer: int
    moments: list[tuple[str, Moment]]
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.peak.total


def predict(step: Step) -> Prediction:
    """Predict the memory of a step after the first, when optimizer state exists, on the device that needs the most.

    If the step has several micro-batches, this is the memory of a later one, when gradients exist, too.
    """
    walk = _StepWalk(step)
    walk.run()
    ledger = walk.ledger
    phases = {name: ledger.peak(name) for name in PHASES}
    host = OptimizerState.of(step).host + step.inputs_on_host * walk.activation_bytes * walk.stream
    return Prediction(ledger.peak(), phases, walk.per_layer, ledger.moments, host)


def extra_validation_bytes(step: Step) -> int:
    """Return an upper limit of the bytes that a validation takes in addition to a captured micro-batch.

    A CUDA graph's memory is only for its replays, so a validation allocates its own. It needs less than a forward that
    keeps the inputs of all blocks.
    """
    forward = predict(replace(step, memory="checkpoint", keep=0.0, offload=0.0)).phases
    fullest = max((forward[name] for name in ("forward", "loss")), key=lambda moment: moment.total)
    held = ("weights", "gradients", "optimizer state", "matrix-product workspace")
    return sum(size for kind, size in fullest.parts.items() if kind not in held)


class _StepWalk(ModuleWalk):
    """One optimizer step of the model: its blocks, the embedding before them, the loss after them, the optimizer."""

    def __init__(self, step: Step) -> None:
        ledger = Ledger()
        super().__init__(step, ledger)
        self.linears = LinearWalk(step, ledger)
        self.norms = NormWalk(step, ledger)
        self.weights = (ShardedWeights if step.dims.shard > 1 else WholeWeights)(step, ledger)
        self.attention = (SharedAttentionWalk if step.dims.context > 1 else AttentionWalk)(step, ledger)
        self.mlp = MLPWalk(step, ledger, self.linears)
        self.tiled_mlp = TiledMLPWalk(step, ledger)
        self.residual = ResidualWalk(step, ledger)
        self.head = step.model.vocab_size * step.model.width
        self.per_layer = 0

    def run(self) -> None:
        self.ledger.phase = "forward"
        self.begin()
        self.forward()
        self.ledger.phase = "loss"
        self.loss()
        self.ledger.phase = "backward"
        self.weights.before_loss_backward()
        self.loss_backward()
        for layer in reversed(range(self.model.n_layers)):
            self.weights.before_backward(layer)
            self.block_backward(layer)
            self.weights.after_backward(layer)
        self.embedding_backward()
        self.weights.after_step_backward()
        self.ledger.phase = "step"
        if not self.step.in_backward:
            self.ledger.hold_briefly("optimizer's copies", "optimizer state", OptimizerState.of(self.step).copies)
        norms = 4 * len(self.linears.weights) * self.model.n_layers
        self.ledger.hold_briefly("norms of the gradients", "optimizer state", norms)

    def begin(self) -> None:
        m, hold = self.model, self.ledger.hold
        copies = 2 if self.step.captured else 1
        hold("workspace", "matrix-product workspace", copies * self.step.workspace)
        self.weights.begin()
        hold("batch", "batch and tables", copies * 3 * 8 * self.step.row_tokens)  # tokens, labels, positions
        self.attention.begin()
        hold("tables", "batch and tables", 2 * 4 * self.step.tokens * m.head_dim // 2)  # cosines and sines

    # -- forward

    def forward(self) -> None:
        ledger = self.ledger
        ledger.hold("x0", "residual stream", self.activation_bytes * self.stream)
        if self.mixed:
            ledger.hold_briefly("embedding in fp32", "residual stream", self.weight_bytes * self.stream)
        for layer in range(self.model.n_layers):
            before = self.activations
            if layer - 1 in range(self.step.inputs_on_host):
                ledger.release(f"x{layer - 1}")
            self.weights.before_forward(layer)
            self.attention_half(layer, saves=self.keeps(layer))
            if self.keeps(layer):
                self.kept_mlp(layer)
            else:
                self.residual.add(f"{layer}.middle", f"{layer}.mixed", self.norms)
                self.tiled_mlp.forward(layer)
                self.ledger.release(f"{layer}.middle", *self.residual.masks(layer))
            self.weights.after_forward(layer)
            if layer == 0:
                self.per_layer = self.activations - before

    def keeps(self, layer: int) -> bool:
        """Whether a block keeps everything for its backward."""
        return layer >= self.step.first_kept

    @property
    def activations(self) -> int:
        """Bytes held for the backward, without weights."""
        parts = self.ledger.parts
        return sum(parts.values()) - parts.get("autocast copies", 0) - parts.get("gathered weights", 0)

    def attention_half(self, layer: int, *, saves: bool) -> None:
        """Walk to `mixed`, the update. With `saves`, autograd keeps what the backward needs; otherwise nothing."""
        self.residual.draw_masks(layer)
        self.norms.forward(f"{layer}.norm1")
        for name, size in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            self.linears.forward(layer, name, name, "attention", size, saves=saves)
        self.attention.forward(layer)
        self.linears.forward(layer, "out", "mixed", "attention", self.stream, saves=saves)
        self.attention.after_forward(layer)
        if not saves:
            self.attention.forget(layer)
            self.norms.forget(f"{layer}.norm1")

    def kept_mlp(self, layer: int) -> None:
        """Walk the MLP of a block that keeps everything."""
        self.residual.add(f"{layer}.middle", f"{layer}.mixed", self.norms, normed=f"{layer}.norm2")
        self.mlp.forward(layer, saves=True)
        self.residual.add(f"x{layer + 1}", f"{layer}.added", self.norms)
        if self.saves_fp32_copy:  # the norms saved fp32 copies instead of the stream
            self.ledger.release(f"{layer}.middle", f"x{layer}")

    # -- loss

    def loss(self) -> None:
        ledger, m, e = self.ledger, self.model, self.activation_bytes
        self.norms.forward("final")
        if not self.step.fused:
            self.chunk_of_logits("forward")
            return
        kind, chunk = "logits and loss", min(self.step.tokens, MAX_LOGIT_TOKENS)
        ledger.hold("losses", kind, 4 * self.step.tokens)
        ledger.hold("gradient of the hidden states", kind, e * self.stream)
        ledger.hold("sum of the head's gradient", kind, 4 * self.head)
        ledger.hold("copy of the head", kind, e * self.head if self.mixed else 0)
        ledger.hold_briefly("logits", kind, e * chunk * m.vocab_size)
        if self.weight_bytes < 4:  # otherwise the sum is the gradient
            ledger.hold_briefly("gradient of the head", kind, self.weight_bytes * self.head)
        ledger.release("losses", "sum of the head's gradient", "copy of the head")
        ledger.hold("gradient of the head", kind, self.weight_bytes * self.head)
        ledger.release("final")

    def chunk_of_logits(self, phase: str) -> None:
        """Walk PyTorch's path: one chunk of logits at a time, which the backward recomputes."""
        size = min(CHUNK_TOKENS, self.step.tokens) * self.model.vocab_size
        copies = (2 if phase == "forward" else 3) * 4  # logits, log-softmax, its gradient: fp32
        head = self.head if self.mixed and phase == "backward" else 0  # in 16 bits
        self.ledger.hold_briefly("logits", "logits and loss", copies * size + self.activation_bytes * head)

    # -- backward

    def loss_backward(self) -> None:
        """Walk from the loss back to `dx`, the gradient of the last block's output."""
        ledger, e = self.ledger, self.activation_bytes
        if self.step.fused:
            self.weight_gradient("head", self.head, ready=True)
            ledger.release("gradient of the head")
        else:
            ledger.hold("gradient of the hidden states", "logits and loss", e * self.stream)
            self.chunk_of_logits("backward")
            self.weight_gradient("head", self.head)
            ledger.hold_briefly("gradient of the hidden states, joined", "logits and loss", e * self.stream)
        if self.adds_head_to_embedding:
            ledger.hold("head's share of the embedding's gradient", "gradients", self.weight_bytes * self.head)
        if not self.step.fused:
            ledger.release("final")
        self.norms.backward("final", ["gradient of the hidden states"], f"x{self.model.n_layers}")
        ledger.hold("dx", "norms" if self.step.fused else "residual stream", e * self.stream)

    def block_backward(self, layer: int) -> None:
        ledger, e, fused = self.ledger, self.activation_bytes, self.step.fused
        if layer - 1 in range(self.step.inputs_on_host):  # it arrives from the host
            ledger.hold(f"x{layer - 1}", "residual stream", e * self.stream)
        if self.keeps(layer):
            self.kept_mlp_backward(layer)
        else:
            self.attention.restore(layer)
            self.attention_half(layer, saves=True)
            self.residual.add(f"{layer}.middle", f"{layer}.mixed", self.norms)
            self.tiled_mlp.backward(layer)

        self.residual.backward(layer, 1)
        ledger.hold(f"{layer}.d mixed", "attention", e * self.heads)
        joined = ["joined"] if self.attention.joins_documents else []
        masked = ["masked 1"] if self.model.residual_dropout else []
        self.linears.backward(layer, "out", *joined, *masked)
        self.attention.backward(layer)
        for name in ("v", "k", "q"):
            ledger.hold(f"{layer}.d norm1 by {name}", "norms", e * self.stream)
            self.linears.backward(layer, name, f"d {name}", *(["norm1"] if name == "q" else []))
            if name != "v" and not fused:  # it is added to v's gradient; the fused norm takes all three
                ledger.release(f"{layer}.d norm1 by {name}")
        by = ["v", "k", "q"] if fused else ["v"]
        x = None if self.saves_fp32_copy and self.keeps(layer) else f"x{layer}"
        self.norms.backward(f"{layer}.norm1", [f"{layer}.d norm1 by {name}" for name in by], x)

    def kept_mlp_backward(self, layer: int) -> None:
        self.residual.backward(layer, 2)
        self.mlp.backward(layer)
        by = ["up", "gate"] if self.step.fused else ["up"]
        middle = None if self.saves_fp32_copy else f"{layer}.middle"
        self.norms.backward(f"{layer}.norm2", [f"{layer}.d norm2 by {name}" for name in by], middle)

    def embedding_backward(self) -> None:
        ledger, m = self.ledger, self.model
        last = "dx"
        if self.mixed:
            last = "dx in fp32"
            ledger.hold(last, "residual stream", self.weight_bytes * self.stream)
            ledger.release("dx")
        ledger.release("tables")
        ends = [last]
        if self.step.fused and self.step.tokens > EMBEDDING_SORT_TOKENS:
            rows = self.step.tokens // EMBEDDING_ROWS_PER_SUM + min(self.step.tokens, m.vocab_size)
            ledger.hold("sums for the embedding", "gradients", 4 * rows * m.width)
            ends.append("sums for the embedding")
        if m.tied_embeddings:
            ledger.hold_briefly("embedding", "gradients", self.weight_bytes * self.head)
            self.update_in_backward(self.head)
        else:
            self.weight_gradient("embedding", self.head, ready=True)
        if self.adds_head_to_embedding:
            ends.append("head's share of the embedding's gradient")
        ledger.release(*ends)

    @property
    def adds_head_to_embedding(self) -> bool:
        """Whether tied weights' two gradients are added up before they move to a bucket or to an earlier gradient."""
        return self.model.tied_embeddings and self.frees_gradients
