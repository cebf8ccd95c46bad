"""Records the memory of a part of a program: every allocation, with the module and the phase that made it.

On CUDA the allocations come from the allocator's history, elsewhere from PyTorch's profiler. Hooks on the modules log
which module runs and change no value; the two logs are joined by time. The profiler's clock may differ from the
system's by more than an operation takes, so each log entry is also a mark in the profiler's record and gets its time.
"""

import bisect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from flash_train.profiling.memory.ledger import ROUND, Moment


@dataclass(frozen=True)
class Allocation:
    """A piece of memory: bytes, address, time of allocation and of release (ns; None: never), and its origin.

    `scope` is the name of the innermost module that ran, "" outside of all. `owner` is the kind of tensor in the memory
    (weights, gradients, …) if it existed before the recording, otherwise "".
    """

    size: int
    address: int
    start: int
    end: int | None
    phase: str
    scope: str
    owner: str = ""


@dataclass(frozen=True)
class Event:
    """Bytes allocated at an address, or released if negative."""

    time: int
    address: int
    size: int


MARK = "flash_train scope "  # followed by an entry's number: the name of a profiler event


class Scopes:
    """A log of the phase and the innermost module, in order of time."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, str, str]] = []
        self.phase = ""
        self._now = ""
        self._stack: list[str] = []  # modules whose forward runs, above the module that ran before them

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._log("")

    def at(self, when: int) -> tuple[str, str]:
        """Return (phase, module) at a time; "" before the first entry."""
        index = bisect.bisect_right(self.entries, when, key=lambda entry: entry[0]) - 1
        return self.entries[index][1:] if index >= 0 else ("", "")

    def last_module(self, when: int) -> str | None:
        """Return the module that ran last, up to a time, in the phase of this time; None if none has run yet."""
        index = bisect.bisect_right(self.entries, when, key=lambda entry: entry[0]) - 1
        phase = self.entries[index][1] if index >= 0 else ""
        while index >= 0 and self.entries[index][1] == phase:
            if self.entries[index][2]:
                return self.entries[index][2]
            index -= 1
        return None

    def change_after(self, when: int) -> int | None:
        """Return the time of the next entry; None if there is none."""
        index = bisect.bisect_right(self.entries, when, key=lambda entry: entry[0])
        return self.entries[index][0] if index < len(self.entries) else None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Log the modules of `model`: before and after their forward, and when their backward begins.

        A module's backward begins when the gradient of its result arrives.
        """
        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter_hook(name)))
            handles.append(module.register_forward_hook(self._leave_hook(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not self._stack:
                self._stack.append(self._now)
            self._stack.append(name)
            self._log(name)

        return hook

    def _leave_hook(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, output: Any) -> None:
            self._stack.pop()
            self._log(self._stack[-1])
            if len(self._stack) == 1:
                self._stack.pop()
            for result in output if isinstance(output, tuple) else (output,):
                passed_on = any(result is given for given in inputs)  # its gradient starts another module's backward
                if isinstance(result, Tensor) and result.requires_grad and not passed_on:
                    result.register_hook(lambda _: self._log(name))

        return hook

    @torch.compiler.disable  # log when the module runs, not when a compiled block is traced
    def _log(self, scope: str) -> None:
        self._now = scope
        with record_function(f"{MARK}{len(self.entries)}"):
            self.entries.append((time.time_ns(), self.phase, scope))

    def use_profiler_times(self, times: dict[str, int]) -> None:
        """Replace the times by the profiler's (ns, by the names of its events)."""
        self.entries = [(times[f"{MARK}{i}"], *entry[1:]) for i, entry in enumerate(self.entries)]


class Recording:
    """The events between two times, and the memory in use before the first.

    Args:
        device: CUDA's allocator records; any other device is treated as the CPU, where the profiler records.
        owned: existing tensors, each with the name of its kind. Tensors that share a storage count once.
    """

    def __init__(self, device: torch.device, owned: Iterable[tuple[str, Tensor]]) -> None:
        self.device, self.scopes = device, Scopes()
        self.snapshot: Any = None  # the CUDA allocator's, for PyTorch's viewer
        self.events: list[Event] = []
        self.before: dict[int, tuple[str, int]] = {}  # address: (kind, bytes)
        for owner, tensor in owned:
            storage = tensor.untyped_storage()
            if storage.device.type == device.type:
                self.before.setdefault(storage.data_ptr(), (owner, storage.nbytes()))
        if device.type == "cuda":  # mostly the workspace of matrix products
            rest = torch.cuda.memory_allocated(device) - sum(size for _, size in self.before.values())
            self.before[-1] = ("matrix-product workspace", max(0, rest))

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        with self.scopes.watching(model), self._record_cuda() if self.device.type == "cuda" else self._record_cpu():
            yield

    def allocations(self) -> list[Allocation]:
        """Return all allocations, in order of their start."""
        open_ = {at: Allocation(size, at, 0, None, "", "", owner) for at, (owner, size) in self.before.items()}
        ended = []
        for event in sorted(self.events, key=lambda event: event.time):
            if event.size > 0:
                phase, scope = self.scopes.at(event.time)
                open_[event.address] = Allocation(event.size, event.address, event.time, None, phase, scope)
            elif event.address in open_:
                gone = open_.pop(event.address)
                ended.append(Allocation(**{**vars(gone), "end": event.time}))
        return sorted([*ended, *open_.values()], key=lambda allocation: allocation.start)

    @contextmanager
    def _record_cpu(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        marks: dict[str, int] = {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield

        def walk(event: Any) -> None:
            if event.name.startswith(MARK):
                marks[event.name] = event.start_time_ns
            if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                fields = event.extra_fields
                self.events.append(Event(event.start_time_ns, fields.ptr, fields.alloc_size))
            for child in event.children:
                walk(child)

        results = profiler.profiler.kineto_results if profiler.profiler else None
        for root in results.experimental_event_tree() if results else ():
            walk(root)
        self.scopes.use_profiler_times(marks)

    @contextmanager
    def _record_cuda(self) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000_000)
        try:
            yield
        finally:
            self.snapshot = torch.cuda.memory._snapshot(self.device)
            torch.cuda.memory._record_memory_history(enabled=None)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.events += events_of(self.snapshot["device_traces"][index])


def events_of(trace: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """Yield the entries of a CUDA allocator's history that change the memory of tensors.

    Sizes are the requested ones, addresses are the blocks', times are Unix microseconds. Memory counts as allocated
    until "free_requested"; "free_completed" follows when no stream uses the block any more.
    """
    signs = {"alloc": 1, "free_requested": -1}
    for entry in trace:
        if sign := signs.get(entry["action"]):
            yield Event(entry["time_us"] * 1000, entry["addr"], sign * -(-entry["size"] // ROUND) * ROUND)


def moments(
    allocations: Iterable[Allocation], kind_of: Callable[[Allocation], str], scopes: Scopes
) -> list[tuple[str, Moment]]:
    """Return the memory held after every change, by kind, with its phase."""
    changes: list[tuple[int, int, Allocation]] = []
    for allocation in allocations:
        changes.append((allocation.start, allocation.size, allocation))
        if allocation.end is not None:
            changes.append((allocation.end, -allocation.size, allocation))
    held: dict[str, int] = {}
    found = []
    for when, size, allocation in sorted(changes, key=lambda change: change[0]):
        kind = kind_of(allocation)
        held[kind] = held.get(kind, 0) + size
        phase, _ = scopes.at(when)
        found.append((phase, Moment({kind: size for kind, size in held.items() if size})))
    return found


@dataclass(frozen=True)
class MemoryProfile:
    """A recorded step, in bytes.

    `moments` are in order, each with its phase; `kept_by_block` is what each block's forward keeps for its backward.
    """

    peak: Moment
    phases: dict[str, Moment]
    kept_by_block: dict[str, int]
    moments: list[tuple[str, Moment]] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total


def profile_of(recording: Recording, model: nn.Module, activation_bytes: int) -> MemoryProfile:
    """Return the profile of one recorded optimizer step.

    Args:
        model: the model whose modules were watched; its blocks are the children of `blocks`.
        activation_bytes: bytes per element of the activations, and of autocast's copies of weights.
    """
    allocations = recording.allocations()
    last = {phase: max((e[0] for e in recording.scopes.entries if e[1] == phase), default=0) for phase in PHASES}
    copies = {
        name: activation_bytes * module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.element_size() != activation_bytes
    }
    step = min((e[0] for e in recording.scopes.entries if e[1] == "step"), default=float("inf"))

    def kind_of(a: Allocation) -> str:
        if a.owner:
            return a.owner
        if a.phase == "backward" and (a.end is None or a.end >= step):
            return "gradients"
        if a.phase == "step":
            return "optimizer state"
        if copies.get(a.scope) == a.size:
            return "autocast copies"
        if a.scope == "" and a.phase == "forward":
            last = recording.scopes.last_module(a.start)
            if last in (None, "embedding"):  # after it comes the cast to autocast's dtype
                return "batch and tables" if last is None else "residual stream"
        kind = kind_of_module(a.scope)
        if kind == "attention" and a.end is not None:
            change = recording.scopes.change_after(a.start)
            if change is None or a.end <= change:  # released before anything else ran
                return "attention workspace"
        return kind

    found = moments(allocations, kind_of, recording.scopes)
    peaks = {phase: _fullest(m for p, m in found if p == phase) for phase in PHASES}
    kept: dict[str, int] = {}
    for a in allocations:
        parts = a.scope.split(".")
        lives = a.end is None or a.end > last["forward"]
        if a.phase == "forward" and lives and parts[0] == "blocks" and kind_of(a) != "autocast copies":
            name = ".".join(parts[:2])
            kept[name] = kept.get(name, 0) + a.size
    return MemoryProfile(_fullest(m for _, m in found), peaks, kept, found)


PHASES = ("forward", "backward", "step")


def kind_of_module(scope: str) -> str:
    """Return the kind of a module's allocations, by its name in `flash_train.model.Transformer`."""
    name = scope.rpartition(".")[2]
    if name.endswith("norm"):
        return "norms"
    for part, kind in (("attention", "attention"), ("mlp", "mlp"), ("blocks", "residual stream")):
        if part in scope.split("."):
            return kind
    return "residual stream" if name == "embedding" else "logits and loss"


def _fullest(found: Iterable[Moment]) -> Moment:
    return max(found, key=lambda moment: moment.total, default=Moment({}))
