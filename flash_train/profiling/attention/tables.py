"""Tables of attention's speed, from the records of ``scripts/bench_attention.py``."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from flash_train.attention.kernels.families import FAMILIES, PORTABLE
from flash_train.records.markdown import joined, number, paragraph
from flash_train.records.markdown import markdown_table as table

Records = list[dict[str, Any]]
DIRECTIONS = ("forward", "backward")
OURS = "this project"
OWN = dict.fromkeys(FAMILIES, OURS) | {PORTABLE.name: "portable"}
NAMES = {
    "fa2": "FlashAttention-2", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "flex": "FlexAttention",
    "flex_fa4": "FlexAttention on FlashAttention-4", "varlen_attn": "varlen_attn", "cudnn_packed": "cuDNN",
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
#: the peers that our rate is divided by, and the implementations that count as each: the first one with a rate counts
RATIOS = {"cuDNN": ("cudnn", "cudnn_packed"), "FlashAttention-4": ("fa4",)}


def full_table(records: Records) -> str:
    """A row per case, forward · backward: our rate, the peers' in ``RATIOS``, and our ratios to them.

    A second table has the rates of all other implementations, and a third one the sparse cases, as fractions of the
    time without the pattern.
    """
    sparse = [record for record in records if record.get("density", 1) < 1]
    records = dense(records)
    first, *others = own_names(records)
    peers, ratios = rates_of_peers(records), ratios_of_cases(records)
    cases = by_case(records, "tflops")
    rows = [
        (
            case,
            joined([found.get((first, way)) for way in DIRECTIONS], ".0f"),
            *(joined(rates[case], ".0f") for rates in peers.values()),
            *(joined(by_name[case], ".2f") for by_name in ratios.values()),
        )
        for case, found in cases.items()
    ]
    text = table(("case", OURS, *peers, *(f"ours / {peer}" for peer in peers)), rows)
    compared = {name for names in RATIOS.values() for name in names}
    names = {name: own_names(records)[name] for name in others}
    names |= {name: label for name, label in measured(NAMES, records).items() if name not in compared}
    if names:
        rest = [
            (case, *(joined([found.get((name, way)) for way in DIRECTIONS], ".0f") for name in names))
            for case, found in cases.items()
        ]
        text += f"\nThe other implementations:\n\n{table(('case', *names.values()), rest)}"
    if sparse:
        words = "Block-sparse cases: the time as a fraction of the time without the pattern."
        text += f"\n{words}\n\n{sparse_table(sparse)}"
    after = [on_flash_attention_3(records) if "flex" in names else "", mean_ratios(records)]
    return f"{text}\n{paragraph(*after)}"


def on_flash_attention_3(records: Records) -> str:
    """A sentence on the versions of FlashAttention without records."""
    if "fa4" in measured(NAMES, records):
        return "FlashAttention-3 is not measured."
    return "FlashAttention-3 and FlashAttention-4 are not measured."


def rates_of_peers(records: Records) -> dict[str, dict[str, list[float | None]]]:
    """Rates, forward and backward, by peer of ``RATIOS`` that was measured, then by case."""
    present = measured(NAMES, records)
    found: dict[str, dict[str, list[float | None]]] = {}
    for peer, names in RATIOS.items():
        if present.keys() & names:
            found[peer] = {}
            for case, rates in by_case(records, "tflops").items():
                theirs = next((name for name in names if rates.get((name, "forward"))), "")
                found[peer][case] = [rates.get((theirs, way)) for way in DIRECTIONS]
    return found


def ratios_of_cases(records: Records) -> dict[str, dict[str, list[float | None]]]:
    """Our rate divided by a peer's, forward and backward: by peer of ``RATIOS`` that was measured, then by case."""
    ours = next(iter(own_names(records)))
    cases = by_case(records, "tflops")

    def ratios(case: str, theirs: list[float | None]) -> list[float | None]:
        own = [cases[case].get((ours, way)) for way in DIRECTIONS]
        return [a / b if a and b else None for a, b in zip(own, theirs, strict=True)]

    return {
        peer: {case: ratios(case, theirs) for case, theirs in by_name.items()}
        for peer, by_name in rates_of_peers(records).items()
    }


def mean_ratios(records: Records) -> str:
    """Sentences with the geometric mean and the smallest of our ratios to each peer."""
    sentences = []
    for peer, cases in ratios_of_cases(records).items():
        ways = [[ratio for ratio in way if ratio] for way in zip(*cases.values(), strict=True)]
        if len(ways[0]) > 1:
            means = [f"{geometric_mean(way):.2f} x {name}" for way, name in zip(ways, DIRECTIONS, strict=True) if way]
            least = [f"{min(way):.2f}" for way in ways if way]
            sentences.append(
                f"Compared with {peer}, in the geometric mean of {len(ways[0])} cases: {' and '.join(means)} "
                f"(lowest: {' and '.join(least)})."
            )
    return " ".join(sentences)


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
    after = paragraph(on_flash_attention_3(records), mean_ratios(dense(records)))
    return f"{words}\n{table(('case', *names.values()), rows)}\n{after}"


def dense(records: Records) -> Records:
    """The records of cases without a sparse pattern."""
    return [record for record in records if record.get("density", 1) == 1]


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
    return table(("case", "blocks attended", *names.values()), rows)


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
