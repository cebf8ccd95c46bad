"""cuDNN's attention over packed rows, through the graphs of its Python front end (package ``nvidia-cudnn-frontend``).

A packed row is "ragged" there: each document is a batch entry, which begins at an offset in elements.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flash_train.profiling.attention.cases import Case


class PackedCudnn:
    """Attention over the packed rows of a case, forward and backward, bf16. A graph is built at its first use.

    Args:
        case: with lengths.
        device: a GPU.
    """

    def __init__(self, case: Case, device: torch.device | str) -> None:
        packing = case.packing(device)
        assert packing is not None
        self.case, self.device = case, device
        self.entries, self.longest = len(case.lengths), max(case.lengths)
        self.boundaries = packing.cu_seqlens_q
        self.lengths = self.boundaries.diff().view(-1, 1, 1, 1)
        self._graphs: dict[str, Graph] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output, shape of q; q, k and v are (tokens, heads, head_dim)."""
        return cast(Tensor, _Packed.apply(q, k, v, self))

    def graph(self, direction: str) -> Graph:
        """Return the graph of a direction, "forward" or "backward"."""
        if direction not in self._graphs:
            graph = Graph(self)
            graph.add_forward() if direction == "forward" else graph.add_backward()
            self._graphs[direction] = graph
        return self._graphs[direction]

    def empty_statistics(self) -> Tensor:
        """Return memory for the log-sum-exp of each query: fp32 (entries, heads, longest, 1)."""
        shape = (self.entries, self.case.n_heads, self.longest, 1)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class Graph:
    """A graph of cuDNN for one direction, with the names of the tensors that it takes and gives.

    Building it needs no GPU, running it does.
    """

    def __init__(self, packed: PackedCudnn) -> None:
        import cudnn

        self.cudnn, self.packed = cudnn, packed
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.tensors: dict[str, Any] = {}
        self._fixed: dict[Any, Tensor] = {}  # the same in every call: offsets and lengths
        self._offsets: dict[int, Any] = {}  # by the number of heads
        self._workspace: Tensor | None = None
        self._handle: Any = None

    def add_forward(self) -> None:
        """The output and the log-sum-exp from q, k and v."""
        inputs = self._inputs()
        out, statistics = self.graph.sdpa(**inputs, **self._options(), generate_stats=True)
        self._give("out", out, self.packed.case.n_heads)
        statistics.set_output(True).set_data_type(self.cudnn.data_type.FLOAT)
        self.tensors["statistics"] = statistics

    def add_backward(self) -> None:
        """The gradients of q, k and v."""
        case, inputs = self.packed.case, self._inputs()
        out, dout = self._take("out", case.n_heads), self._take("dout", case.n_heads)
        shape = (self.packed.entries, case.n_heads, self.packed.longest, 1)
        stride = (case.n_heads * self.packed.longest, self.packed.longest, 1, 1)
        statistics = self.graph.tensor(dim=list(shape), stride=list(stride), data_type=self.cudnn.data_type.FLOAT)
        self.tensors["statistics"] = statistics
        total = sum(case.lengths)
        gradients = self.graph.sdpa_backward(
            **inputs, o=out, dO=dout, stats=statistics, **self._options(),
            max_total_seq_len_q=total, max_total_seq_len_kv=total,
        )  # fmt: skip
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            self._give(name, gradient, case.n_heads if name == "dq" else case.n_kv_heads)

    def run(self, **tensors: Tensor) -> None:
        """Run the graph on tensors by name, outputs included."""
        if self._handle is None:
            self._handle = self.cudnn.create_handle()
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
            self.graph.check_support()
            self.graph.build_plans()
            size = self.graph.get_workspace_size()
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.packed.device)
        self.cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        given = {self.tensors[name]: tensor for name, tensor in tensors.items()}
        self.graph.execute(given | self._fixed, self._workspace, handle=self._handle)

    def _inputs(self) -> dict[str, Any]:
        case = self.packed.case
        heads = {"q": case.n_heads, "k": case.n_kv_heads, "v": case.n_kv_heads}
        return {name: self._take(name, count) for name, count in heads.items()}

    def _options(self) -> dict[str, Any]:
        case = self.packed.case
        queries, keys = (self._constant(self.packed.lengths) for _ in range(2))
        return {
            "attn_scale": case.spec(self.packed.device).scale_for(case.head_dim),
            "use_causal_mask": case.causal,
            "use_padding_mask": True,
            "seq_len_q": queries,
            "seq_len_kv": keys,
        }

    def _take(self, name: str, heads: int) -> Any:
        shape, stride = self._shape(heads)
        tensor = self.graph.tensor(dim=shape, stride=stride, data_type=self.cudnn.data_type.BFLOAT16, name=name)
        tensor.set_ragged_offset(self._offset(heads))
        self.tensors[name] = tensor
        return tensor

    def _give(self, name: str, tensor: Any, heads: int) -> None:
        shape, stride = self._shape(heads)
        tensor.set_output(True).set_dim(shape).set_stride(stride).set_ragged_offset(self._offset(heads))
        self.tensors[name] = tensor

    def _shape(self, heads: int) -> tuple[list[int], list[int]]:
        """Shape and strides of an entry in the order of cuDNN: entries, heads, tokens, head_dim."""
        packed, head_dim = self.packed, self.packed.case.head_dim
        row = heads * head_dim
        return [packed.entries, heads, packed.longest, head_dim], [packed.longest * row, head_dim, row, 1]

    def _offset(self, heads: int) -> Any:
        if heads not in self._offsets:
            offsets = self.packed.boundaries.long() * heads * self.packed.case.head_dim
            self._offsets[heads] = self._constant(offsets.view(-1, 1, 1, 1))
        return self._offsets[heads]

    def _constant(self, data: Tensor) -> Any:
        kind = self.cudnn.data_type.INT64 if data.dtype == torch.int64 else self.cudnn.data_type.INT32
        tensor = self.graph.tensor(dim=list(data.shape), stride=[1] * data.dim(), data_type=kind)
        self._fixed[tensor] = data
        return tensor


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedCudnn) -> Tensor:
        out, statistics = torch.empty_like(q), packed.empty_statistics()
        packed.graph("forward").run(q=q, k=k, v=v, out=out, statistics=statistics)
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.packed = packed
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, statistics = ctx.saved_tensors
        gradients = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        graph = ctx.packed.graph("backward")
        graph.run(q=q, k=k, v=v, out=out, dout=dout.contiguous(), statistics=statistics, **gradients)
        return (*gradients.values(), None)
