"""A micro-batch's forward and backward as a CUDA graph.

Steps over short rows are launch-bound: a thousand kernels are launched for each. All batches of a run have the same
shape, and this project's kernels read the documents' boundaries on the device. So the launches of one micro-batch are
captured (`torch.cuda.CUDAGraph`), and replayed for every later batch, which is copied to where the captured one was.
The optimizer's step and everything around it run as without graphs. Other attention is launched for the documents'
lengths, so its graph serves batches with the same lengths.

A replay reads the present state of PyTorch's generator, so it draws the random numbers of a run without graphs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_train.output import LOGGER
from flash_train.records.memory_use import bytes_in_words
from flash_train.training.batch import Batch

#: micro-batches that run without a graph: they compile and choose kernels, and allocate the optimizer's state
WARM_UP = 2

Sums = tuple[Tensor, Tensor]  # of the losses in nats, and the number of labelled tokens
Replay = Callable[[], Any]
#: returns what runs a function again, and the tensors that each run writes
Capture = Callable[[Callable[[], Sums]], tuple[Replay, Sums]]


class CudaCapture:
    """Captures functions as CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Sums]) -> tuple[Replay, Sums]:
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(torch.cuda.current_device())
        # Another thread may use CUDA meanwhile: with workers, a thread of the data loader pins the next batch
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            sums = run()
        self._pool = graph.pool()
        return graph.replay, sums


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return a device's stream for captures; PyTorch's default one is on the device of the process's first capture."""
    return torch.cuda.Stream(device)


class StepGraph:
    """Replays the forward and backward of micro-batches.

    A step's first micro-batch writes the gradients and the later ones add to them: these are two graphs. A batch of
    another shape than the first one's runs without a graph.

    Args:
        loss: returns the loss of a batch to run backward from, and the sums that it came from.
        parameters: the weights.
        by_lengths: whether a batch must have documents of the same lengths, too.
        settings: returns what the graphs take as it is when they are captured. A change ends them.
        required: whether a failed capture is an error. If not, a message says so, and the run continues without graphs.
        capture: how to capture; tests on a CPU give another.
    """

    def __init__(
        self,
        loss: Callable[[Batch], tuple[Tensor, Sums]],
        parameters: Sequence[nn.Parameter],
        *,
        by_lengths: bool = False,
        settings: Callable[[], Any] = lambda: None,
        required: bool = True,
        capture: Capture | None = None,
    ) -> None:
        self._loss, self._by_lengths, self._required = loss, by_lengths, required
        self._settings, self._captured_settings = settings, None
        self._all = list(parameters)
        self._addresses: list[int] = []  # of the weights, at the capture
        self._learn = [parameter.requires_grad for parameter in parameters]
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._capture = capture or CudaCapture()
        self._is_on = True
        self._seen = 0
        self._batch: Batch | None = None  # what the graphs read
        self._gradients: list[Tensor | None] | None = None  # where they write
        self._replays: dict[bool, tuple[Replay, Sums]] = {}  # of a step's first micro-batch, and of later ones

    def run(self, batch: Batch) -> Sums | None:
        """Return a micro-batch's sums, or None if it must run without a graph; the next call overwrites them.

        The weights get their gradients by `give_gradients`.
        """
        self._seen += 1
        is_first = all(parameter.grad is None for parameter in self._parameters)
        if not self._is_on or self._seen <= WARM_UP or not (is_first or self._are_given()):
            return None
        if [parameter.requires_grad for parameter in self._all] != self._learn:
            self._end(RuntimeError("weights were frozen or unfrozen since training began"))
            return None
        if self._batch is None:
            self._captured_settings, self._addresses = self._settings(), self._present_addresses()
            self._batch = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
        elif self._settings() != self._captured_settings:
            self._end(RuntimeError("accumulate_grad_batches or the mode of a module has changed since the capture"))
            return None
        elif self._present_addresses() != self._addresses:
            self._end(RuntimeError("a weight has got other memory since the capture"))
            return None
        elif not self._serves(batch, self._batch):
            return None
        for name, x in batch.items():
            if isinstance(x, Tensor):
                self._batch[name].copy_(x)
        if is_first not in self._replays and not self._add_graph(self._batch, is_first):
            return None
        replay, sums = self._replays[is_first]
        replay()
        return sums

    def give_gradients(self) -> None:
        """Give the weights the gradients of the step so far."""
        assert self._gradients is not None
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def release(self) -> None:
        """Free the memory, and run without graphs from now on."""
        self._replays.clear()
        self._batch = self._gradients = None
        self._is_on = False

    def _end(self, error: RuntimeError) -> None:
        """Run without graphs from now on, or raise the error if graphs are required."""
        if self._required:
            raise error
        self.release()
        LOGGER.warning("trainer.cuda_graph=auto: runs without a CUDA graph (%s)", str(error).partition("\n")[0])

    def _present_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._all]

    def _serves(self, batch: Batch, captured: Batch) -> bool:
        same_lengths = not self._by_lengths or batch.get("lengths") == captured.get("lengths")
        return same_lengths and _shapes(batch) == _shapes(captured)

    def _are_given(self) -> bool:
        pairs = zip(self._parameters, self._gradients or (), strict=False)
        return self._gradients is not None and all(parameter.grad is gradient for parameter, gradient in pairs)

    def _add_graph(self, batch: Batch, is_first: bool) -> bool:
        """Capture a micro-batch; return whether there is a graph."""
        torch.cuda.empty_cache()  # the graph has memory of its own
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved()

        def forward_and_backward() -> Sums:
            loss, sums = self._loss(batch)
            with torch.autocast(loss.device.type, enabled=False):  # as around Lightning's backward
                loss.backward()
            return sums[0].detach(), sums[1]

        try:
            self._replays[is_first] = self._capture(forward_and_backward)
        except RuntimeError as error:
            for parameter in self._parameters if is_first else ():
                parameter.grad = None
            self._end(error)
            return False
        if is_first:
            self._gradients = [parameter.grad for parameter in self._parameters]
        took = bytes_in_words(torch.cuda.memory_reserved() - reserved)
        which = "a step's first micro-batch" if is_first else "further micro-batches"
        LOGGER.info("CUDA graph of %s: captured in %.1f s, %s", which, time.perf_counter() - start, took)
        return True


def _shapes(batch: Batch) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) for name, x in batch.items() if isinstance(x, Tensor)}
