"""The memory of the MLP half of a recomputed block, in tiles of the row (see `flash_train/model/tiled_mlp.py`)."""

from dataclasses import replace

from flash_train.distributed.dims import ParallelDims
from flash_train.model.tiled_mlp import tile_size
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.module_walks import LinearWalk, MLPWalk, ModuleWalk, NormWalk
from flash_train.profiling.memory.step import Step


class TiledMLPWalk(ModuleWalk):
    """From `middle`, the stream after attention, to the stream after the block, and back.

    All tiles take the same memory, so it walks through one.
    """

    def __init__(self, step: Step, ledger: Ledger) -> None:
        super().__init__(step, ledger)
        # A tile's gradients of the weights are summed or returned here, so nothing else moves them.
        one_device = ParallelDims(shard=step.dims.shard)
        tokens = tile_size(step.tokens)
        tile = replace(
            step, seq_len=tokens, batch_size=1, accumulate=1, lengths=None, dims=one_device, in_backward=False
        )
        tiles = -(-step.tokens // tokens)
        self.several = tiles > 1
        self.norms, linears = NormWalk(tile, ledger), LinearWalk(tile, ledger)
        self.mlp = MLPWalk(tile, ledger, linears)
        self.linear_weights = {name: linears.weights[name] for name in ("gate", "up", "down")}
        self.update = self.activation_bytes * tokens * step.model.width
        # The first tile's gradients are the sums of two tiles until the second one's are added to them in fp32.
        count = sum(self.linear_weights.values())
        self.sums = (self.weight_bytes if tiles == 2 else 4) * count
        self.wider_sums = (self.weight_bytes + 4) * count - self.sums if self.weight_bytes < 4 else 0

    def forward(self, layer: int) -> None:
        """Make `x`, the stream after the block."""
        self.ledger.hold(f"x{layer + 1}", "residual stream", self.activation_bytes * self.stream)
        self.norms.forward(f"{layer}.norm2")
        self.mlp.forward(layer, saves=False)
        self._drop(layer)
        self.norms.forget(f"{layer}.norm2")
        self.ledger.release(f"{layer}.added", *self._kept_copy(layer))

    def backward(self, layer: int) -> None:
        """Make the gradients of the weights and of `middle`; `dx` is the one before and after."""
        ledger = self.ledger
        sums = f"{layer}.sums of the MLP's gradients"
        if self.several:
            ledger.hold(f"{layer}.d middle", "norms", self.activation_bytes * self.stream)
            ledger.hold(sums, "gradients", self.sums)
        self.norms.forward(f"{layer}.norm2")
        self.mlp.forward(layer, saves=True, needs_value=False)
        self._drop(layer)
        if self.model.residual_dropout:
            for name in ("scaled 2", "masked 2"):
                ledger.hold(f"{layer}.{name}", "residual stream", self.update)
            ledger.release(f"{layer}.scaled 2")
        self.mlp.backward(layer)
        by = ["up", "gate"] if self.step.fused else ["up"]
        self.norms.backward(f"{layer}.norm2", [f"{layer}.d norm2 by {name}" for name in by], None)
        ledger.release(f"{layer}.added", *self._kept_copy(layer))
        if self.model.residual_dropout:
            ledger.release(f"{layer}.mask2")
        if self.several:
            ledger.hold_briefly(f"{layer}.sums in fp32", "gradients", self.wider_sums)
            ledger.release(sums, f"{layer}.d middle")
        ledger.release(f"{layer}.middle")
        self.update_in_backward(max(self.linear_weights.values()))
        if self.frees_gradients:
            ledger.release(*(f"gradient {layer}.weights of {name}" for name in self.linear_weights))

    def _kept_copy(self, layer: int) -> list[str]:
        return [f"{layer}.dropped"] if self.model.residual_dropout else []

    def _drop(self, layer: int) -> None:
        """Mask the update, and scale what the mask leaves."""
        for name in self._kept_copy(layer):
            self.ledger.hold(f"{name} by the mask", "residual stream", self.update)
            self.ledger.hold(name, "residual stream", self.update)
            self.ledger.release(f"{name} by the mask")
