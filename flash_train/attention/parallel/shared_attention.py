"""Attention over a packed row that the ranks of a process group share."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flash_train.attention.dropout import RngState
from flash_train.attention.functional import attention, prepare
from flash_train.attention.masks import Band
from flash_train.attention.parallel.gather import SharedKeys
from flash_train.attention.parallel.method_choice import Method, Sizes, can_divide_heads
from flash_train.attention.parallel.operator import Settings, attend
from flash_train.attention.parallel.shared_row import SharedRow
from flash_train.attention.spec import AttentionSpec


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    row: SharedRow,
    *,
    method: Method | None = None,
    rng: RngState | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute this rank's part of the attention over a row that several ranks share; differentiable.

    All ranks of the group must call it, with the same settings. ``attention`` on the whole row gives the same result,
    with the same dropout mask.

    Args:
        q: (seq_len / ranks, heads, head_dim): the rank's tokens, in the order of ``row.plan.positions(rank)``.
        k, v: (seq_len / ranks, kv_heads, head_dim); v may have another head_dim.
        spec: a causal mask or a window to the left; the plan must have the same window.
        method: ``ulysses``: every rank computes some heads of the whole row; q, k, v and the output are exchanged
            (Jacobs et al., 2023, arXiv:2309.14509). ``heads`` must be a multiple of the ranks, and one of ``kv_heads``
            and the ranks must divide the other. ``gather``: every rank computes all heads of its queries, and fetches
            the keys and values that they read. ``auto``: the faster one by ``choose_method``. None: ``row.method``.
        rng: dropout state, the same on all ranks; needed with dropout. Its ``entry`` belongs to the row's first
            document.
        sinks: (heads,), the same on all ranks. Each rank's gradient is its part of the whole.
        backend: as for ``attention``.

    Returns:
        (seq_len / ranks, heads, head_dim) of v; zero for padding.

    Raises:
        ValueError: settings that the method or the plan does not allow.
    """
    method = method or row.method
    if method == "auto":
        method = row.choose_method(Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size()))
    _check(q, k, v, spec, row, method, rng, sinks)
    if method == "gather" and row.plan.is_local:
        entries = row.cached(SharedKeys.of).whole[0].entries
        if rng is not None:
            rng = replace(rng, entry=0, entries=entries.from_entry(rng.entry).origins)
        return attention(q, k, v, spec, packing=entries.packing, rng=rng, sinks=sinks, backend=backend)
    (q, k, v), (name, _) = prepare(q, k, v, spec, row.own_packing, rng, None, sinks, backend, False)
    if method == "ulysses":  # each rank needs at least one key head
        k, v = (x.repeat_interleave(max(1, row.plan.ranks // x.shape[1]), 1) for x in (k, v))
    state, entry, head = None, 0, 0
    if spec.dropout > 0 and rng is not None:
        state, entry, head = rng.as_tensor(q.device), rng.entry, rng.head
    settings = Settings(method, name, spec.scale_for(q.shape[-1]), spec.softcap, spec.dropout, entry, head)
    return attend(q, k, v, sinks, state, row, settings)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    row: SharedRow,
    method: str,
    rng: RngState | None,
    sinks: Tensor | None,
) -> None:
    ranks, tokens = row.plan.ranks, row.plan.seq_len // row.plan.ranks
    if method not in ("ulysses", "gather"):
        raise ValueError(f"method={method!r}: must be 'auto', 'gather' or 'ulysses'")
    if not isinstance(spec.mask, Band) or spec.mask.right != 0:
        raise ValueError(f"mask={spec.mask!r}: must be Causal() or Window(left, 0) if several ranks share a row")
    if spec.mask.left != row.plan.window:
        raise ValueError(f"mask={spec.mask!r}: its window must be {row.plan.window}, the plan's window")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != tokens:
            raise ValueError(f"{name}.shape[0]={x.shape[0]}: must be {tokens}, the tokens of each rank in the plan")
    if spec.dropout > 0 and rng is None:
        raise ValueError(f"dropout={spec.dropout} without rng: all ranks need the same RngState")
    if rng is not None and (rng.query or rng.key or rng.entries is not None):
        raise ValueError(f"rng={rng!r}: query and key must be 0 and entries None, because the plan gives them")
    heads, kv_heads = q.shape[1], k.shape[1]
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks.shape={tuple(sinks.shape)}: must be ({heads},), the heads of q")
    if method == "ulysses" and not can_divide_heads(heads, kv_heads, ranks):
        raise ValueError(
            f"method='ulysses' with {heads} heads, {kv_heads} key heads and {ranks} ranks: the ranks must divide the "
            "heads, and divide the key heads or be a multiple of them; 'gather' has no such limit"
        )
