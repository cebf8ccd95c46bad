"""The memory of attention on one of several devices that share a row.

The walks follow `flash_train/attention/parallel/gather.py` and `ulysses.py`: which group of heads travels while another
is computed, and when Python drops the last reference to a group's tensors.
"""

from __future__ import annotations

from flash_train.attention.kernels.families import is_own
from flash_train.attention.parallel import Method, Sizes, choose_method
from flash_train.attention.parallel.head_groups import HeadGroup, head_groups
from flash_train.precision import PRECISIONS
from flash_train.profiling.memory.attention_walk import AttentionWalk
from flash_train.profiling.memory.ledger import Ledger
from flash_train.profiling.memory.row_share import largest_share, plan_of
from flash_train.profiling.memory.step import Step

KIND = "exchanged heads"


class SharedAttentionWalk(AttentionWalk):
    """Attention over a row that the devices of a context group share."""

    def __init__(self, step: Step, ledger: Ledger) -> None:
        super().__init__(step, ledger)
        ranks, m = step.dims.context, step.model
        self.ranks, self.ulysses = ranks, _method(step) == "ulysses"
        self.share = largest_share(step.documents, step.row_tokens, ranks)
        self.call_kv_heads = max(m.n_kv_heads, ranks) if self.ulysses else m.n_kv_heads
        self.row_bytes = self.activation_bytes * m.head_dim
        if self.ulysses:
            heads, kv_heads = m.n_heads // ranks, self.call_kv_heads // ranks
            transfer = step.row_tokens * (heads + 2 * kv_heads) * self.row_bytes * (ranks - 1) // ranks
        else:
            heads, kv_heads = m.n_heads, m.n_kv_heads
            transfer = self.share.largest * 2 * kv_heads * self.row_bytes
        self.forward_groups = head_groups(heads, kv_heads, transfer, sends_results=self.ulysses)
        self.backward_groups = head_groups(heads, kv_heads, transfer, sends_results=True)

    @property
    def is_local(self) -> bool:
        """Whether this is the attention of one device: no document is split."""
        return not self.ulysses and self.share.largest == 0

    @property
    def joins_documents(self) -> bool:
        return self.is_local and super().joins_documents

    @property
    def _pair_names(self) -> tuple[str, ...]:
        return super()._pair_names if self.is_local else ()  # the backward computes the pairs again

    def begin(self) -> None:
        hold = self.ledger.hold
        hold("own part of the batch", "batch and tables", 4 * 8 * self.step.tokens)  # also the positions in the row
        share = self.share
        lists = share.keys + share.sent + 2 * (share.received + share.shared)
        hold("lists of rows", "batch and tables", 4 * (4 * self.step.row_tokens if self.ulysses else lists))

    def after_forward(self, layer: int) -> None:
        if self.ulysses:
            self.ledger.release(f"{layer}.own k", f"{layer}.own v")

    # -- forward

    def _attend(self, layer: int) -> None:
        if self.is_local:
            super()._attend(layer)
            return
        if self.ulysses:  # it repeats keys and values; the caller still has the ones that it gave
            for name in ("k", "v"):
                self.ledger.rename(f"{layer}.{name}", f"{layer}.own {name}")
                size = self.step.tokens * self.call_kv_heads * self.row_bytes
                self.ledger.hold(f"{layer}.{name}", "attention", size)
        if f"{layer}.out" in self.ledger.held:  # kept by `memory=selective`
            return
        self.ledger.hold(f"{layer}.out", "attention", self.activation_bytes * self.heads)
        for number, (rows, _) in enumerate(self._whole_calls):
            self.ledger.hold(f"{layer}.lse whole {number}", "attention", 4 * rows * self.model.n_heads)
        for number, group in enumerate(self.forward_groups):
            self._bring(layer, self.forward_groups, number, queries=1)
            found = f"{layer}.found {number}"
            self.ledger.hold_briefly(f"{layer}.scores", "attention workspace", self._scores(group))
            if not self._writes_output:
                self.ledger.hold(found, "attention", self._query_rows * _count(group.heads) * self.row_bytes)
            self.ledger.hold(f"{layer}.lse {number}", "attention", 4 * self._query_rows * _count(group.heads))
            self._drop(f"{layer}.found {number - 1}")
            if self.ulysses:
                self._send_back(layer, number, _count(group.heads))
        parts = [name for name in self.ledger.held if name.startswith(f"{layer}.lse ")]
        if len(parts) > 1 or self.ulysses:
            self.ledger.hold(f"{layer}.lse", "attention", 4 * self.step.tokens * self.model.n_heads)
            self._drop(*parts)
        else:
            self.ledger.rename(parts[0], f"{layer}.lse")
        self._end(layer)

    # -- backward

    def backward(self, layer: int) -> None:
        if self.is_local:
            super().backward(layer)
            return
        ledger, m = self.ledger, self.model
        ledger.hold(f"{layer}.d q", "attention", self.activation_bytes * self.heads)
        for name in ("k", "v"):
            ledger.hold(f"{layer}.d {name}", "attention", ledger.size_of(f"{layer}.{name}"))
        for number, group in enumerate(self.backward_groups):
            self._bring(layer, self.backward_groups, number, queries=3)
            if number == 0:
                self._whole_backward(layer, self._whole_calls[:1])
            heads, kv_heads = map(_count, group)
            queries = self._query_rows * heads * self.row_bytes
            ledger.hold(f"{layer}.d keys {number}", KIND, 2 * self._key_rows * kv_heads * self.row_bytes)
            workspace = self._workspace(self._query_rows, heads, self._entries) + self._scores(group)
            if self.ulysses:
                ledger.hold(f"{layer}.found {number}", "attention", queries)
            elif not (self._writes_output and len(self.backward_groups) == 1):
                workspace += queries
            ledger.hold_briefly(f"{layer}.rows", "attention workspace", workspace)
            if self.ulysses:
                self._drop(f"{layer}.found {number - 1}", f"{layer}.d keys {number - 1}")
                self._send_back(layer, number, heads + 2 * kv_heads)
            else:
                size = (self.share.sent + self.share.received) * 2 * kv_heads * self.row_bytes
                ledger.hold(f"{layer}.back {number}", KIND, size)
                self._drop(f"{layer}.d keys {number - 2}", f"{layer}.back {number - 2}")
        self._whole_backward(layer, self._whole_calls[1:])
        self._end(layer)
        ledger.release(*(f"{layer}.{name}" for name in ("q", "k", "v", "out", "lse", "d mixed")))
        if self.ulysses and self.call_kv_heads != m.n_kv_heads:  # gradients of repeated heads are added up
            for name in ("k", "v"):
                ledger.hold(f"{layer}.d own {name}", "attention", self.activation_bytes * self.kv_heads)
                ledger.release(f"{layer}.d {name}")
                ledger.rename(f"{layer}.d own {name}", f"{layer}.d {name}")
        if m.qk_norm:
            self._norm_heads_backward(layer)

    # -- exchanges

    @property
    def _query_rows(self) -> int:
        """Rows of the queries of a call for a group of heads."""
        return self.step.row_tokens if self.ulysses else self.share.shared

    @property
    def _entries(self) -> int:
        if self.ulysses:
            return len(self.step.documents)
        return self.share.calls[0][1] if self.is_local else self.share.pieces

    @property
    def _whole_calls(self) -> tuple[tuple[int, int], ...]:
        """Rows and entries of each call for documents that the device holds whole."""
        return () if self.ulysses else self.share.calls

    def _whole_backward(self, layer: int, calls: tuple[tuple[int, int], ...]) -> None:
        for rows, entries in calls:
            workspace = self._workspace(rows, self.model.n_heads, entries)
            self.ledger.hold_briefly(f"{layer}.rows", "attention workspace", workspace)

    @property
    def _key_rows(self) -> int:
        return self.step.row_tokens if self.ulysses else self.share.keys

    def _bring(self, layer: int, groups: list[HeadGroup], number: int, *, queries: int) -> None:
        """Bring a group's heads to the device; the next group's begin to travel before.

        With ulysses these are `queries` tensors of the queries' shape, keys and values; otherwise keys and values.
        """
        if number == 0:
            self._start(layer, 0, groups[0], queries)
        if number + 1 < len(groups):
            self._start(layer, number + 1, groups[number + 1], queries)
        self._drop(f"{layer}.transfer {number - 1}")
        self.ledger.hold(f"{layer}.brought {number}", KIND, self._brought(groups[number], queries))
        if not self.ulysses:
            self._drop(f"{layer}.transfer {number}")
        self._drop(f"{layer}.brought {number - 1}")

    def _start(self, layer: int, number: int, group: HeadGroup, queries: int) -> None:
        """Start the transfer of a group: a buffer for what is sent and one for what arrives."""
        if self.ulysses:
            size = 2 * self._brought(group, queries)
        else:
            size = (self.share.sent + self.share.received) * 2 * _count(group.kv_heads) * self.row_bytes
        self.ledger.hold(f"{layer}.transfer {number}", KIND, size)

    def _brought(self, group: HeadGroup, queries: int) -> int:
        """Return the bytes of a group's heads in the attention call."""
        heads, kv_heads = map(_count, group)
        return self._key_rows * (2 * kv_heads + (queries * heads if self.ulysses else 0)) * self.row_bytes

    def _send_back(self, layer: int, number: int, heads: int) -> None:
        """Send a group's results to the devices that hold the tokens; the results before the last have arrived."""
        size = 2 * self.step.row_tokens * heads * self.row_bytes
        self.ledger.hold(f"{layer}.back {number}", KIND, size)
        self._drop(f"{layer}.back {number - 2}")

    def _end(self, layer: int) -> None:
        """Release what the exchanges and the calls still hold."""
        prefixes = tuple(f"{layer}.{name} " for name in ("transfer", "brought", "found", "back", "d keys"))
        self._drop(*[name for name in self.ledger.held if name.startswith(prefixes)])

    def _drop(self, *names: str) -> None:
        """Release the names that are held; ignore the others."""
        self.ledger.release(*(name for name in names if name in self.ledger.held))

    # -- attention calls

    @property
    def _writes_output(self) -> bool:
        """Whether a group's forward writes to the layer's output, not to a tensor of its own."""
        return not self.ulysses and is_own(self.step.attention)

    def _workspace(self, queries: int, heads: int, entries: int) -> int:
        """Return the bytes of a call's backward in addition to its gradients."""
        return 4 * self.backward_rows(queries, heads, entries) + self.chunk()

    def _scores(self, group: HeadGroup) -> int:
        """Return the bytes of a score matrix of the longest document, in a backend that has one."""
        if self.step.attention != "standard" and not self.step.holds_score_matrices:
            return 0
        longest = max(self.step.documents)
        queries = longest if self.ulysses else min(longest, self.step.tokens)
        return 3 * 4 * _count(group.heads) * queries * longest


def _count(heads: slice) -> int:
    return int(heads.stop - heads.start)


def _method(step: Step) -> Method:
    """Return the method of the step's row, also if the row chooses it."""
    if step.method != "auto":
        return step.method
    m, element_bytes = step.model, PRECISIONS[step.precision].activation_bytes
    plan = plan_of(step.documents, step.row_tokens, step.dims.context)
    return choose_method(plan, Sizes(m.n_heads, m.n_kv_heads, m.head_dim, m.head_dim, element_bytes))
