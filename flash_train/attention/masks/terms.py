"""Terms that are more than a band: blocks, documents, trees, and functions of the user's own."""

from __future__ import annotations

import copy
import importlib
import pickle
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_train.attention.checks import integer, integers
from flash_train.attention.masks.base import MAP_BLOCK, WHOLE, BlockMap, Lowered, Mask, mask_end
from flash_train.attention.packing import Entry


@dataclass(frozen=True, eq=False)
class BlockSparse(Mask):
    """Attention between the blocks that a pattern names; the kernels visit no other.

    Attributes:
        pattern: bool (query blocks, key blocks), or (heads, query blocks, key blocks), on the device of q. Blocks past
            its end are not attended. ``flash_train.attention.patterns`` builds usual ones.
        block: positions per block, one int or (queries, keys). The kernels skip by blocks of powers of two of at
            least 16; other blocks they evaluate pair by pair.
    """

    pattern: Tensor
    block: int | tuple[int, int] = 128

    def __post_init__(self) -> None:
        if self.pattern.dtype != torch.bool or self.pattern.dim() not in (2, 3):
            raise ValueError(
                f"BlockSparse pattern is {self.pattern.dtype} of shape {tuple(self.pattern.shape)}: must be bool "
                "(query blocks, key blocks) or (heads, query blocks, key blocks)"
            )
        one = integer(self.block)
        sizes = integers(self.block) if one is None else [one, one]
        if sizes is None or len(sizes) != 2 or min(sizes) < 1:
            raise ValueError(f"BlockSparse(block={self.block!r}): must be a positive integer or two")
        if one is not self.block:
            object.__setattr__(self, "block", (sizes[0], sizes[1]) if one is None else one)

    @property
    def sizes(self) -> tuple[int, int]:  # type: ignore[override]
        return (self.block, self.block) if isinstance(self.block, int) else self.block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.pattern.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.pattern,)

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        pattern = F.pad(self.pattern if self.pattern.dim() == 3 else self.pattern[None], (0, 1, 0, 1))  # past its end
        block_q, block_k = self.sizes
        rows, columns = pattern.shape[1] - 1, pattern.shape[2] - 1
        return pattern[:, (q // block_q).clamp(max=rows), (k // block_k).clamp(max=columns)]

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        return mask_end(_pool(self.dense(entry, n_heads).cpu(), block_q, block_k), entry, block_k)

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        states = self.pattern.to(torch.int8) * WHOLE
        return BlockMap(states[None] if states.dim() == 3 else states[None, None], *self.sizes)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        _on_device("BlockSparse pattern", self.pattern, device)
        if self.pattern.dim() == 3 and self.pattern.shape[0] != n_heads:
            raise ValueError(f"BlockSparse pattern has {self.pattern.shape[0]} heads and q {n_heads}: must be equal")
        if not packed:
            need = (-(-len_q // self.sizes[0]), -(-len_k // self.sizes[1]))
            have = tuple(self.pattern.shape[-2:])
            if have[0] < need[0] or have[1] < need[1]:
                raise ValueError(f"BlockSparse pattern has {have} blocks and the lengths need {need}")


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """A query attends to keys of the same document, for tensors that are padded, or packed further.

    ``Packing`` is faster where documents are contiguous: it never visits another document's blocks, nor masks them.

    Attributes:
        q_ids: int32, (batch, seqlen_q), or (seqlen_q,) for every batch row; packed (total_q,).
        k_ids: the same for the keys; without it, those of the queries.
    """

    q_ids: Tensor
    k_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name, ids in (("q_ids", self.q_ids), ("k_ids", self._k)):
            if ids.dtype != torch.int32 or ids.dim() not in (1, 2):
                raise ValueError(
                    f"Document {name} is {ids.dtype} of shape {tuple(ids.shape)}: must be int32 (batch, seqlen), "
                    "(seqlen,) or packed (total,)"
                )

    @property
    def _k(self) -> Tensor:
        return self.q_ids if self.k_ids is None else self.k_ids

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.q_ids.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.q_ids, self._k)

    @property
    def per_entry(self) -> bool:
        return self.q_ids.dim() == 2 or self._k.dim() == 2

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        return (_row(self.q_ids, entry.batch)[entry.q_row + q] == _row(self._k, entry.batch)[entry.k_row + k])[None]

    def lower(self) -> Lowered:
        return Lowered(-1, -1, "document", [self.q_ids.contiguous(), self._k.contiguous()], -1)

    def block_map(self, len_q: int, len_k: int, packed: bool, block: tuple[int, int] | None = None) -> BlockMap | None:
        if packed:  # an entry's blocks do not begin at multiples of a block in the tensor
            return None
        sizes = block or (MAP_BLOCK, MAP_BLOCK)
        q_range = _block_range(self.q_ids, sizes[0])
        k_range = q_range if self.k_ids is None and sizes[0] == sizes[1] else _block_range(self._k, sizes[1])
        q_low, q_high, k_low, k_high = (*(x[:, :, None] for x in q_range), *(x[:, None, :] for x in k_range))
        visited = (q_low <= k_high) & (k_low <= q_high)
        whole = (q_low == k_high) & (k_low == q_high)  # and so all four are equal
        return BlockMap((visited.to(torch.int8) + whole)[:, None], *sizes)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for name, ids, length in (("q_ids", self.q_ids, len_q), ("k_ids", self._k, len_k)):
            _on_device(f"Document {name}", ids, device)
            allowed = [(length,)] if packed else [(length,), (batch, length)]
            if tuple(ids.shape) not in allowed:
                raise ValueError(
                    f"Document {name} has shape {tuple(ids.shape)}: must be {' or '.join(map(str, allowed))}"
                )


@dataclass(frozen=True, eq=False, init=False)
class Tree(Mask):
    """A node attends to its ancestors, to itself and to everything before the tree: speculative decoding.

    The last ``n`` positions of queries and keys are the nodes; the keys before them are a prefix that every query sees.

    Attributes:
        parents: the index of each node's parent, -1 for a root; int (n,), or (batch, n) for a tree per batch row or
            packed entry. A list is taken as a tensor. A CPU tensor is checked, since reading it costs nothing.
        bits: int32 (batch or 1, n, ceil(n / 32)): bit k % 32 of word k // 32 says that the node attends to node k.
    """

    parents: Tensor
    bits: Tensor

    def __init__(self, parents: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
        parents = torch.as_tensor(parents)
        if parents.dtype not in (torch.int32, torch.int64) or parents.dim() not in (1, 2) or parents.numel() == 0:
            raise ValueError(
                f"Tree parents are {parents.dtype} of shape {tuple(parents.shape)}: must be integers (n,) or "
                "(batch, n), n at least 1"
            )
        ancestors = _ancestors(parents if parents.dim() == 2 else parents[None])
        if parents.device.type == "cpu":
            _check_parents(parents, ancestors)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "bits", _pack(ancestors))

    @property
    def n_nodes(self) -> int:
        return self.parents.shape[-1]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.bits.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.bits,)

    @property
    def per_entry(self) -> bool:
        return self.bits.shape[0] > 1

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        words = self.bits[entry.index if self.bits.shape[0] > 1 else 0]
        node_q, node_k = q + self.n_nodes - entry.len_q, k + self.n_nodes - entry.len_k
        word = words[node_q.clamp(min=0), node_k.clamp(min=0) // 32]
        ancestor = (word >> (node_k.clamp(min=0) % 32)) & 1 == 1
        return ((node_k < 0) | (ancestor & (node_q >= 0)))[None]

    def blocks(self, entry: Entry, block_q: int, block_k: int, n_heads: int = 1) -> Tensor:
        states = super().blocks(entry, block_q, block_k, n_heads)
        before = torch.arange(1, states.shape[2] + 1) * block_k <= entry.len_k - self.n_nodes
        return torch.where(before, WHOLE, states).to(torch.int8)

    def lower(self) -> Lowered:
        return Lowered(-1, -1, "tree", [self.bits], self.n_nodes)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        _on_device("Tree parents", self.bits, device)
        if self.bits.shape[0] not in (1, batch):
            raise ValueError(f"Tree has {self.bits.shape[0]} trees for {batch} sequences: must be 1 or as many")


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """A rule of the user's own: a ``@triton.jit`` function for the kernels and its twin for PyTorch.

    Attributes:
        kernel: ``@triton.jit`` function ``(entry, head, q, k, *pointers) -> bool tile``; ``q`` is int32 [M, 1] and
            ``k`` [1, N], positions within the sequence; ``entry`` has ``index, batch, q_row, k_row, len_q, len_k``.
            Positions are always inside the sequence, so that loads need no mask.
        twin: the same in PyTorch, ``(entry, head, q, k, *tensors) -> bool tensor``.
        tensors: what both read, contiguous, on the device of q.

    A copy shares both functions; a deep copy has tensors of its own. Pickling stores the functions' names, as for any
    function: both must lie at the top level of a module that the reader can import.
    """

    kernel: Any
    twin: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.twin):
            raise TypeError(f"MaskFunction(twin={self.twin!r}): must be the kernel's rule as a function in PyTorch")
        object.__setattr__(self, "name", _name_of(self))

    def __copy__(self) -> MaskFunction:
        return MaskFunction(self.kernel, self.twin, self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskFunction:
        return MaskFunction(self.kernel, self.twin, copy.deepcopy(self.tensors, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.twin, types.FunctionType):
            _importable_name("twin", self.twin)
        return _restored, (*_importable_name("kernel", self.kernel), self.twin, self.tensors)

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return self.tensors[0].device if self.tensors else None

    @property
    def per_entry(self) -> bool:
        return True

    def attends(self, entry: Entry, q: Tensor, k: Tensor, n_heads: int) -> Tensor:
        shape = torch.broadcast_shapes(q.shape, k.shape)
        rules = [self.twin(entry, head, q, k, *self.tensors) for head in range(n_heads)]
        for rule in rules:
            if not isinstance(rule, Tensor) or rule.dtype != torch.bool:
                given = rule.dtype if isinstance(rule, Tensor) else repr(rule)
                raise TypeError(f"MaskFunction's twin returned {given}: must return a bool tensor")
        return torch.stack([rule.expand(shape) for rule in rules])

    def lower(self) -> Lowered:
        return Lowered(-1, -1, self.name, list(self.tensors), -1)

    def validate(self, batch: int, len_q: int, len_k: int, n_heads: int, device: torch.device, packed: bool) -> None:
        for tensor in self.tensors:
            _on_device("MaskFunction tensor", tensor, device)
            if not tensor.is_contiguous():
                raise ValueError(
                    f"MaskFunction tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: must be "
                    "contiguous, since kernels get no strides"
                )


class KnownFunction(NamedTuple):
    """What the kernels need to know of a ``MaskFunction`` beside its tensors."""

    kernel: Any
    n_tensors: int


#: user functions by name: an operator's arguments can hold a name but no function
FUNCTIONS: dict[str, KnownFunction] = {}


def function_named(name: str) -> KnownFunction:
    """Raises ValueError where no mask of this process has the name, which a saved program may bring."""
    if name not in FUNCTIONS:
        raise ValueError(f"the mask's kernel {name} is not known here: make its MaskFunction before the program runs")
    return FUNCTIONS[name]


def _name_of(function: MaskFunction) -> str:
    """One name per kernel, not per mask: masks made anew for every batch stay the same call to ``torch.compile``.

    It is that of the kernel's function, as for pickle, so that a program saved elsewhere finds its own or none.
    """
    found = KnownFunction(function.kernel, len(function.tensors))
    for name, known in FUNCTIONS.items():
        if known.kernel is found.kernel and known.n_tensors == found.n_tensors:
            return name
    python = getattr(found.kernel, "fn", found.kernel)
    name = base = f"{getattr(python, '__module__', '')}.{getattr(python, '__qualname__', 'function')}"
    while name in FUNCTIONS:  # one of a name that was taken before, as by closures
        name = f"{base}.{len(FUNCTIONS)}"
    FUNCTIONS[name] = found
    return name


def _importable_name(role: str, function: Any) -> tuple[str, str]:
    """Module and qualified name of a kernel or twin. Raises PicklingError where they do not lead back to it."""
    python = getattr(function, "fn", function)  # Triton's kernels hold their function
    module, name = getattr(python, "__module__", None), getattr(python, "__qualname__", None)
    try:
        found = _imported(module, name)
    except (AttributeError, ImportError, TypeError):
        found = None
    if found is not function:
        raise pickle.PicklingError(
            f"MaskFunction({role}={module}.{name}): must be a function at the top level of a module to be pickled, no "
            "lambda nor closure; pass what it closes over as tensors=(...)"
        )
    return module, name


def _imported(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _restored(module: str, name: str, twin: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> MaskFunction:
    """The mask that was pickled."""
    return MaskFunction(_imported(module, name), twin, tensors)


def _pool(dense: Tensor, block_q: int, block_k: int) -> Tensor:
    """States of the blocks of a dense rule."""
    heads, len_q, len_k = dense.shape
    rows, columns = -(-len_q // block_q), -(-len_k // block_k)

    def pooled(fill: bool) -> Tensor:
        padded = torch.full((heads, rows * block_q, columns * block_k), fill)
        padded[:, :len_q, :len_k] = dense
        return padded.view(heads, rows, block_q, columns, block_k).transpose(2, 3).flatten(3)

    return pooled(False).any(-1).to(torch.int8) + pooled(True).all(-1).to(torch.int8)


def _block_range(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id of each block: (batch or 1, blocks)."""
    ids = ids if ids.dim() == 2 else ids[None]
    missing = -ids.shape[1] % block
    if missing:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1)
    blocks = ids.reshape(ids.shape[0], ids.shape[1] // block, block)
    return torch.aminmax(blocks, dim=-1)


def _row(ids: Tensor, batch: int) -> Tensor:
    return ids[batch] if ids.dim() == 2 else ids


def _ancestors(parents: Tensor) -> Tensor:
    """(batch, n) parents to bool (batch, n, n), True where the key node is the query node or one of its ancestors."""
    n = parents.shape[-1]
    node = torch.arange(n, device=parents.device)
    seen = ((parents[..., None] == node) | (node[:, None] == node)).float()
    for _ in range(max(n - 1, 1).bit_length()):  # each squaring doubles the generations seen
        seen = (seen @ seen > 0).float()
    return seen > 0


def _check_parents(parents: Tensor, ancestors: Tensor) -> None:
    """Raise ValueError for nodes that do not exist, and for nodes that are their own ancestors by way of others."""
    n = parents.shape[-1]
    low, high = int(parents.min()), int(parents.max())
    if low < -1 or high >= n:
        wrong = low if low < -1 else high
        raise ValueError(f"Tree parents name node {wrong} of {n}: must be 0 to {n - 1}, or -1 for a root")
    mutual = (ancestors & ancestors.mT).sum((1, 2)) > n
    if bool(mutual.any()):
        raise ValueError(f"Tree parents {parents.tolist()} run in a circle: must lead to a root, whose parent is -1")


def _pack(visible: Tensor) -> Tensor:
    """bool (..., n) to int32 words (..., ceil(n / 32)), key k in bit k % 32 of word k // 32."""
    missing = -visible.shape[-1] % 32
    bits = torch.cat([visible, visible.new_zeros(*visible.shape[:-1], missing)], -1)
    weights = 2 ** torch.arange(32, device=bits.device)
    words = (bits.view(*bits.shape[:-1], -1, 32) * weights).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def _on_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and q on {device}: must be the same device")
