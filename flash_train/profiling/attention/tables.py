"""Tables of attention's speed, from the records of ``scripts/bench_attention.py``."""

from __future__ import annotations

from typing import Any

from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.records.markdown import joined, number
from flash_train.records.markdown import markdown_table as table

Records = list[dict[str, Any]]
DIRECTIONS = ("forward", "backward")
OURS = "this project"
OWN = dict.fromkeys(FAMILIES, OURS) | {PORTABLE.name: "… portable"}
NAMES = {
    "fa2": "FlashAttention-2", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "flex": "FlexAttention",
    "flex_fa4": "FlexAttention on FlashAttention-4", "varlen_attn": "varlen_attn", "cudnn_packed": "cuDNN, packed",
}  # fmt: skip
#: cases of the short table of attention, in the words of a reader who does not know the names of the cases
SHORT_CASES = {
    "d128-h16-n16384-causal": "head_dim 128, causal",
    "d64-h32-n16384-causal": "head_dim 64, causal",
    "d256-h8-n16384-causal": "head_dim 256, causal",
    "d128-h16-n16384-full": "head_dim 128, full",
    "d128-h16-n16384-causal-dropout0.1": "head_dim 128, causal, dropout 0.1",
}
SHORT_PEERS = ("fa2", "fa4", "cudnn", "flex")
#: the peers that our rate is divided by, and the implementations that count as each: the first one with a rate is used
RATIOS = {"cuDNN": ("cudnn", "cudnn_packed", "varlen_attn"), "FlashAttention-4": ("fa4",)}


def absent(records: Records) -> str:
    """Return a sentence on the implementations that these tables do not have."""
    names = ("FlashAttention-3",) if "fa4" in measured(NAMES, records) else ("FlashAttention-3", "FlashAttention-4")
    verb = "is" if len(names) == 1 else "are"
    back_end = "FlexAttention runs its Triton back end"
    if "flex_fa4" in measured(NAMES, records):
        back_end += ", unless the column names another one"
    return f"{' and '.join(names)} {verb} not in these tables. {back_end}.\n"


def full_table(records: Records) -> str:
    """A row per case: each implementation's rates, forward · backward, and our ratios to cuDNN.

    Sparse cases follow in a table of their own, as fractions of the time without the pattern.
    """
    sparse = [record for record in records if record.get("density", 1) < 1]
    records = [record for record in records if record not in sparse]
    names = own_names(records) | measured(NAMES, records)
    ours = next(iter(names))
    shown = {peer: columns for peer, columns in RATIOS.items() if peer == "cuDNN" or names.keys() & columns}
    rows = []
    for case, found in by_case(records, "tflops").items():
        pairs = {name: [found.get((name, way)) for way in DIRECTIONS] for name in names}
        ratios = []
        for columns in shown.values():
            theirs = next((pairs[name] for name in columns if any(pairs.get(name, ()))), (None, None))
            ratios.append([a / b if a and b else None for a, b in zip(pairs[ours], theirs, strict=True)])
        rows.append((case, *(joined(pair, ".0f") for pair in pairs.values()), *(joined(two, ".2f") for two in ratios)))
    packed = " (packed: varlen_attn)" if "varlen_attn" in names and "cudnn_packed" not in names else ""
    labels = [f"ratio to {peer}" + packed * (peer == "cuDNN") for peer in shown]
    text = table(("case", *names.values(), *labels), rows)
    if sparse:
        text += "\n" + sparse_table(sparse)
    return text + (f"\n{absent(records)}" if "flex" in names else "")


def short_table(records: Records) -> str:
    """A row per case of ``SHORT_CASES``, without our portable kernels and without the peers of packed rows."""
    ours = next(iter(own_names(records)))
    names = {ours: OURS, **measured({name: NAMES[name] for name in SHORT_PEERS}, records)}
    gpu = records[0]["gpu"]
    words = f"The attention operator over 16,384 tokens in TFLOP/s, forward · backward, bf16 ({gpu}).\n"
    rows = []
    for case, found in by_case(records, "tflops").items():
        if case in SHORT_CASES:
            rates = (joined([found.get((name, way)) for way in DIRECTIONS], ".0f") for name in names)
            rows.append((SHORT_CASES[case], *rates))
    return f"{words}{absent(records)}\n{table(('case', *names.values()), rows)}"


def sparse_table(records: Records) -> str:
    """A row per case: the share of the blocks that is attended, and the time as a fraction of the dense time."""
    names = own_names(records) | measured(NAMES, records)
    density = {record["case"]: record["density"] for record in records}
    rows = [
        (
            case,
            number(density[case], ".1%"),
            *(joined([found.get((name, way)) for way in DIRECTIONS], ".3f") for name in names),
        )
        for case, found in by_case(records, "time_to_dense").items()
    ]
    labels = (f"{label}: time / dense" for label in names.values())
    return table(("case", "blocks attended", *labels), rows)


def own_names(records: Records) -> dict[str, str]:
    """Our kernels that have records; where there are none but the portable ones, they are "this project"."""
    found = measured(OWN, records)
    return found if len(found) > 1 else dict.fromkeys(found or [PORTABLE.name], OURS)


def measured(names: dict[str, str], records: Records) -> dict[str, str]:
    """The implementations that have records."""
    found = {record["implementation"] for record in records}
    return {name: label for name, label in names.items() if name in found}


def by_case(records: Records, key: str) -> dict[str, dict[tuple[str, str], float | None]]:
    """A number by (implementation, direction) of every case, in the records' order."""
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for record in records:
        found.setdefault(record["case"], {})[record["implementation"], record["direction"]] = record.get(key)
    return found
