"""The memory of each kind of module in a training step: the tensors of its forward and of its backward.

A walk enters tensors into the step's ledger when PyTorch makes them and releases them when PyTorch frees them. Names in
the ledger begin with the layer's number. Sizes are in elements unless they are called bytes.
"""

from collections.abc import Sequence

from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.step import Step
from flash_train.profiling.memory.weights_walk import copies_of_one


class ModuleWalk:
    """The base of all walks. It has the step, its ledger, and the sizes of its tensors."""

    def __init__(self, step: Step, ledger: Ledger) -> None:
        m, precision = step.model, PRECISIONS[step.precision]
        self.step, self.model, self.ledger = step, m, ledger
        self.activation_bytes = precision.activation_bytes
        # The modules' weights: FSDP gathers them in the dtype of the computation
        self.weight_bytes = self.activation_bytes if step.dims.shard > 1 else precision.weight_bytes
        self.mixed = self.weight_bytes != self.activation_bytes  # autocast
        # DDP copies a gradient into its bucket; later micro-batches add theirs to the first one's
        self.moves_gradients = step.dims.shard == 1 and (step.accumulate > 1 or step.dims.ranks > 1)
        self.frees_gradients = self.moves_gradients or step.in_backward  # once they are complete
        self.saves_fp32_copy = self.activation_bytes < 4 and not step.fused  # in PyTorch's norm
        self.fp8 = precision.fp8 and step.fused  # only a GPU has such products
        self.saves_product = self.fp8 or not step.fused  # in the MLP; otherwise the backward computes it again
        self.stream = step.tokens * m.width
        self.hidden = step.tokens * m.mlp_width
        self.heads = step.tokens * m.n_heads * m.head_dim
        self.kv_heads = step.tokens * m.n_kv_heads * m.head_dim

    def weight_gradient(self, name: str, size: int, releases: Sequence[str] = (), *, ready: bool = False) -> None:
        """Make a weight's gradient. Under autocast it is in 16 bits first, unless it is `ready` in the weight's dtype.

        The tensors in `releases` are released before the gradient is converted to the weight's dtype.
        """
        ledger, narrow = self.ledger, self.mixed and not ready
        first_name = "gradient in 16 bits" if narrow else f"gradient {name}"
        ledger.hold(first_name, "gradients", (self.activation_bytes if narrow else self.weight_bytes) * size)
        ledger.release(*releases)
        if narrow:
            ledger.hold(f"gradient {name}", "gradients", self.weight_bytes * size)
            ledger.release(first_name)
        self.update_in_backward(size)
        if self.frees_gradients:
            ledger.release(f"gradient {name}")

    def update_in_backward(self, size: int) -> None:
        """Update a weight whose gradient is complete, if the step does so within the backward."""
        if self.step.in_backward:
            self.ledger.hold_briefly("optimizer's copies", "optimizer state", copies_of_one(self.step, size))


class LinearWalk(ModuleWalk):
    """The linear layers of a block, by their names in `Attention` and `SwiGLU`."""

    def __init__(self, step: Step, ledger: Ledger) -> None:
        super().__init__(step, ledger)
        m = step.model
        queries, keys, mlp = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim, m.mlp_width
        self.features = {  # of each layer's input and result
            "q": (m.width, queries), "k": (m.width, keys), "v": (m.width, keys), "out": (queries, m.width),
            "gate": (m.width, mlp), "up": (m.width, mlp), "down": (mlp, m.width),
        }  # fmt: skip
        self.weights = {name: inputs * results for name, (inputs, results) in self.features.items()}

    def forward(self, layer: int, weight: str, result: str, kind: str, size: int, *, saves: bool) -> None:
        """Multiply by the weight. Under autocast this makes a 16-bit copy, which Lightning does not cache."""
        if self.fp8:  # both operands in fp8
            inputs = self.step.tokens * self.features[weight][0]
            self.ledger.hold_briefly("operands in fp8", kind, self.weights[weight] + inputs)
        copy = f"copy {layer}.{weight}"
        self.ledger.hold(copy, "autocast copies", self.activation_bytes * self.weights[weight] if self.mixed else 0)
        self.ledger.hold(f"{layer}.{result}", kind, self.activation_bytes * size)
        if not saves:
            self.ledger.release(copy)

    def backward(self, layer: int, weight: str, *uses: str) -> None:
        """Make the weight's gradient, then release `uses`: the layer's input and its result's gradient."""
        releases = [f"copy {layer}.{weight}", *(f"{layer}.{name}" for name in uses)]
        if self.fp8:  # the operands of the weight's gradient, each also transposed
            operands = 2 * self.step.tokens * sum(self.features[weight])
            kind = "mlp" if weight in ("gate", "up", "down") else "attention"
            self.ledger.hold_briefly("operands in fp8", kind, operands)
        alone = self.step.dims.ranks == 1 and not self.fp8
        adds = self.moves_gradients and alone and layer >= self.step.first_kept
        if adds:  # within the product (see `Transformer.adding_gradients`)
            narrow = self.mixed and not self.step.fused
            self.ledger.hold_briefly(
                "gradient in 16 bits", "gradients", self.activation_bytes * self.weights[weight] if narrow else 0
            )
            self.ledger.release(*releases)
        else:
            name, size = f"{layer}.weights of {weight}", self.weights[weight]
            self.weight_gradient(name, size, releases, ready=self.step.fused)


class NormWalk(ModuleWalk):
    """The RMS norms over the residual stream."""

    def forward(self, name: str) -> None:
        """Make the result, and save a number per row. PyTorch's own norm also saves the scaled rows."""
        hold = self.ledger.hold
        hold(name, "norms", self.activation_bytes * self.stream)
        hold(f"{name} rstd", "norms", 4 * self.step.tokens)
        if not self.step.fused:
            hold(f"{name} scaled", "norms", self.activation_bytes * self.stream)
            if self.saves_fp32_copy:
                hold(f"{name} wide", "norms", 4 * self.stream)
            self.ledger.hold_briefly(f"{name} squared", "norms", 4 * self.stream)

    def forget(self, name: str) -> None:
        """Release the result and what was saved: the forward will run again."""
        scaled = [] if self.step.fused else [f"{name} scaled"]
        self.ledger.release(name, f"{name} rstd", *scaled, *([f"{name} wide"] if self.saves_fp32_copy else []))

    def backward(self, name: str, gradients: Sequence[str], source: str | None) -> None:
        """Make the gradient of the input `source` from the gradients of the result.

        `source` is None if the input's fp32 copy replaced it.
        """
        ledger, kind = self.ledger, "norms"
        ledger.hold(f"d {name}", kind, self.activation_bytes * self.stream)
        if not self.step.fused:  # product by product: with the weight, with the scaled rows, and through the mean
            wide = f"d {name} in fp32"
            ledger.hold_briefly(f"d {name} of its weight", kind, self.activation_bytes * self.stream)
            ledger.release(*gradients, f"{name} scaled")
            ledger.hold(wide, kind, (4 if self.saves_fp32_copy else 0) * self.stream)
            ledger.hold_briefly(f"{wide} by rows", kind, 2 * 4 * self.stream)
            ledger.release(wide)
        ledger.release(*(gradients if self.step.fused else ()), *([source] if source else []))
        ledger.release(f"{name} rstd", *([f"{name} wide"] if self.saves_fp32_copy else []), f"d {name}")


class ResidualWalk(ModuleWalk):
    """The residual stream: dropout on an update, and its addition."""

    def masks(self, layer: int) -> list[str]:
        return [f"{layer}.mask{i}" for i in (1, 2)] if self.model.residual_dropout else []

    def draw_masks(self, layer: int) -> None:
        for mask in self.masks(layer):
            if self.step.dims.context > 1:  # the mask of the whole row, and then this device's part
                whole = f"{mask} of the row"
                self.ledger.hold(whole, "residual stream", self.step.row_tokens * self.model.width)
            self.ledger.hold(mask, "residual stream", self.stream)
            if self.step.dims.context > 1:
                self.ledger.release(whole)

    def add(self, name: str, update: str, norms: NormWalk, *, normed: str | None = None) -> None:
        """Add `update` to the stream, then norm the sum if `normed` is given; with dropout, mask and scale it first."""
        dropped = [f"{update} {i}" for i in (1, 2)] if self.model.residual_dropout else []
        for copy in dropped:
            self.ledger.hold(copy, "residual stream", self.activation_bytes * self.stream)
        in_norm = normed is not None and self.step.fused  # one kernel adds and norms
        self.ledger.hold(name, "norms" if in_norm else "residual stream", self.activation_bytes * self.stream)
        if normed and in_norm:
            norms.forward(normed)
        self.ledger.release(update, *dropped)
        if normed and not in_norm:
            norms.forward(normed)

    def backward(self, layer: int, which: int) -> None:
        """Walk an update's gradient through its dropout; `masked` stays held."""
        if self.model.residual_dropout:
            for name in ("scaled", "masked"):
                self.ledger.hold(f"{layer}.{name} {which}", "residual stream", self.activation_bytes * self.stream)
            self.ledger.release(f"{layer}.scaled {which}", f"{layer}.mask{which}")


class MLPWalk(ModuleWalk):
    """SwiGLU, from the rows of its norm, `norm2`, to `added`."""

    def __init__(self, step: Step, ledger: Ledger, linears: LinearWalk) -> None:
        super().__init__(step, ledger)
        self.linears = linears

    def forward(self, layer: int, *, saves: bool, needs_value: bool = True) -> None:
        """Walk to `added`. Without `needs_value` the fused path stops before it (see `ops.swiglu_linear`)."""
        ledger, fused = self.ledger, self.step.fused
        for name in ("gate", "up"):
            self.linears.forward(layer, name, name, "mlp", self.hidden, saves=saves)
        if not (self.saves_product or needs_value):
            self.linears.forward(layer, "down", "added", "mlp", 0, saves=saves)
            return
        if not fused:
            ledger.hold(f"{layer}.silu", "mlp", self.activation_bytes * self.hidden)
        ledger.hold(f"{layer}.product", "mlp", self.activation_bytes * self.hidden)
        if not (fused or saves):
            ledger.release(f"{layer}.silu")
        self.linears.forward(layer, "down", "added", "mlp", self.stream, saves=saves)
        if not self.saves_product:
            ledger.release(f"{layer}.product")
        if not saves:
            ledger.release(f"{layer}.gate", f"{layer}.up", *([f"{layer}.product"] if self.saves_product else []))

    def backward(self, layer: int) -> None:
        """Walk to `d norm2 by up`; the fused norm takes `d norm2 by gate` too, so that also stays held."""
        ledger, fused, kind = self.ledger, self.step.fused, "mlp"
        size = self.activation_bytes * self.hidden
        ledger.hold(f"{layer}.d product", kind, size)
        masked = ["masked 2"] if self.model.residual_dropout else []
        self.linears.backward(layer, "down", "product" if self.saves_product else "d product", *masked)
        if self.fp8:
            ledger.release(f"{layer}.d product")
        if not fused:
            ledger.hold(f"{layer}.d silu", kind, size)
            ledger.hold(f"{layer}.d up", kind, size)
            ledger.release(f"{layer}.silu", f"{layer}.up", f"{layer}.d product")
            ledger.hold(f"{layer}.d gate", kind, size)
            ledger.release(f"{layer}.d silu", f"{layer}.gate")
        for name in ("up", "gate"):
            ledger.hold(f"{layer}.d norm2 by {name}", "norms", self.activation_bytes * self.stream)
            gradient = name if fused else f"d {name}"  # the kernel writes the gradients over gate and up
            self.linears.backward(layer, name, gradient, *(["norm2"] if name == "gate" else []))
        if not fused:  # added to the gradient by up
            ledger.release(f"{layer}.d norm2 by gate")
