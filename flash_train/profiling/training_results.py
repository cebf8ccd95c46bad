"""Tables of training on one GPU: the measured runs, and the comparison with a peer."""

import math
from typing import Any

from flash_train.records.markdown import difference, joined, number, paragraph
from flash_train.records.markdown import markdown_table as table

Records = list[dict[str, Any]]
PEERS = {"flash_train": "this project", "transformers": "transformers + Liger"}
PARTS = ("forward", "backward", "optimizer")


def runs_table(records: Records) -> str:
    """A row per run."""
    rows = [
        (
            record["attention"],
            f"{record['seq_len']:,}",
            number(record["tokens_per_second"], ",.0f"),
            number(record["mfu"], ".1%"),
            number(record["peak_memory_gib"], ".1f"),
            number(record["train_loss_last_10"], ".3f"),
        )
        for record in records
    ]
    return table(("attention", "seq_len", "tokens/s", "MFU", "peak GiB", "loss (mean of last 10)"), rows)


def graphs_table(records: Records) -> str:
    """A row per model, length and accumulation, with and without a CUDA graph."""
    by_case: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for record in records:
        case = tuple(record[name] for name in ("model", "precision", "seq_len", "batch_size", "accumulate"))
        by_case.setdefault(case, {})[record["cuda_graph"]] = record
    rows = []
    for (model, precision, seq_len, batch_size, accumulate), found in by_case.items():
        without, captured = found[False], found[True]
        rows.append(
            (
                f"`{model}`",
                f"`{precision}`",
                f"{seq_len:,} x {batch_size}",
                str(accumulate or 1),
                *(number(one["mfu"], ".1%") for one in (without, captured)),
                *(number(1e3 * one["step_seconds"], ".1f") for one in (without, captured)),
                number(without["step_seconds"] / captured["step_seconds"], ".2f"),
            )
        )
    header = ("model", "precision", "tokens", "`accumulate`", "MFU", "captured", "step (ms)", "captured", "ratio")
    return f"Medians of a step ({records[0]['device']}):\n\n" + table(header, rows, left=3)


def long_rows_table(records: Records) -> str:
    """A row per run of one step over a single document, and what the record lacks."""
    rows = [
        (
            f"`{record['model']}`",
            number(record["seq_len"], ","),
            f"`{record['memory']}`",
            _optimizer(record),
            number(record["step_seconds"], ".1f"),
            number(record["mfu"], ".1%"),
            number(record["peak_memory_gib"], ".1f"),
            number(record.get("predicted_memory_gib"), ".1f"),
        )
        for record in records
    ]
    header = (
        "model", "tokens", "`memory`", "master and moments", "step (s)", "MFU", "peak (GiB)", "predicted (GiB)",
    )  # fmt: skip
    steps = max(record["steps"] for record in records)
    words = f"{'One step' if steps == 1 else f'{steps} steps'} over a row that is a single document"
    notes = []
    if any(not (record["master"] and record["moments"]) for record in records):
        notes.append("By default the optimizer has an exact master and moments in bf16.")
    if any("memory_offload" not in record for record in records):
        notes.append("The record names a run with `memory=offload` by the mode that this stands for, `checkpoint`.")
        notes.append("It does not hold how many inputs of blocks were in the host's memory.")
    if any(record.get("predicted_memory_gib") is None for record in records):
        notes.append("It does not hold the predicted peaks.")
    if steps == 1:
        notes.append("Each run has one step, so its time includes what a first step prepares.")
    return f"{words} ({records[0]['device']}):\n\n{table(header, rows, left=1)}\n{paragraph(*notes)}"


def _optimizer(record: dict[str, Any]) -> str:
    """How a run stored the optimizer's state. Names that are missing stand for the defaults."""
    given = [words for words in (record["master"], record["moments"]) if words]
    where = ["on the host"] if record["optimizer_offload"] else []
    return ", ".join([*(given or ["defaults"]), *where])


def fp8_table(records: Records) -> str:
    """A row per precision and recipe; the others are compared with the record in bf16-true with this project's kernels.

    A record in bf16-true with other attention shows how far the losses of equal runs differ.
    """
    in_bf16 = [record for record in records if record["precision"] == "bf16-true"]
    (plain,) = [record for record in in_bf16 if record["attention"] == "flash"]
    others = [record for record in in_bf16 if record is not plain]

    def name(record: dict[str, Any]) -> str:
        if record["precision"] != "bf16-true":
            return f"`{record['precision']}`, `{record['recipe']}`"
        return "`bf16-true`" + (f", `attention={record['attention']}`" if record is not plain else "")

    rows = [
        (
            name(record),
            number(record["tokens_per_second"], ",.0f"),
            number(record["tokens_per_second"] / plain["tokens_per_second"], ".2f"),
            number(record["mfu"], ".1%"),
            *(
                f"{record[loss]:.4f} ({difference(record[loss] / plain[loss] - 1)})"
                for loss in ("train_loss_mean", "train_loss_last_10", "val_loss")
            ),
        )
        for record in (plain, *others, *(record for record in records if record not in in_bf16))
    ]
    words = f"`{plain['model']}` with {plain['seq_len']:,} tokens, {plain['steps']} steps ({plain['device']}):\n\n"
    header = ("precision", "tokens/s", "ratio", "MFU", "loss, all steps", "last 10 steps", "validation")
    return words + table(header, rows, left=1)


def updates_table(records: Records) -> str:
    """A row per way to keep the weights of a model that is tuned on; first what it was before."""
    (start,) = [record for record in records if record["model"] != "pretrained"]
    (fp32,) = [record for record in records if record["model"] == "pretrained" and record["precision"] != "bf16-true"]
    tuned = [record for record in records if record["precision"] == "bf16-true"]
    gain = start["val_loss"] - fp32["val_loss"]
    words = paragraph(
        f"`{start['model']}` was trained for {start['steps']} steps of `data=stdlib` in `{start['precision']}`,",
        f"and then tuned for {fp32['steps']} more with `optimizer.lr=2e-5` ({start['device']}).",
        f"Validation loss before: {start['val_loss']:.4f}. One seed. The `bf16-true` runs keep their moments in bf16.",
    )
    rows = [
        (
            f"`{record['precision']}`",
            f"`{record['master']}`" if record["master"] else "fp32 weights",
            number(record["val_loss"], ".4f"),
            difference(record["val_loss"] / fp32["val_loss"] - 1),
            number((start["val_loss"] - record["val_loss"]) / gain, ".0%"),
            number(record.get("tokens_per_second"), ",.0f"),
            number(record.get("peak_memory_gib"), ".2f"),
        )
        for record in sorted([fp32, *tuned], key=lambda record: record["val_loss"])
    ]
    header = (
        "precision", "`optimizer.master`", "validation loss", "to fp32 weights", "share of their progress", "tokens/s",
        "peak GiB",
    )  # fmt: skip
    return f"{words}\n{table(header, rows, left=2)}"


def kernels_table(records: Records) -> str:
    """A row per kind of kernel, and a column per run: milliseconds of a step, and launches."""
    records = sorted(records, key=lambda record: (record["model"], record["seq_len"], _is_recent(record)))
    runs = [{one["kind"]: one for one in record["kernel_kinds"]} for record in records]
    kinds = sorted(
        {kind for run in runs for kind in run},
        key=lambda kind: -max(run[kind]["seconds"] for run in runs if kind in run),
    )

    def cell(one: dict[str, Any] | None) -> str:
        return f"{1e3 * one['seconds']:.1f} ({one['launches']:,})" if one else "–"

    rows = [(kind, *(cell(run.get(kind)) for run in runs)) for kind in kinds]
    idle = [max(0.0, record["step_seconds"] - record["busy_seconds"]) for record in records]
    rows.append(("no kernel runs", *(f"{1e3 * seconds:.1f}" for seconds in idle)))
    rows.append(("whole step", *(f"{1e3 * record['step_seconds']:.1f}" for record in records)))
    updates = [run["optimizer"]["seconds"] if "optimizer" in run else None for run in runs]
    shares = [
        updated / record["step_seconds"] if updated else None for updated, record in zip(updates, records, strict=True)
    ]
    rows.append(("the optimizer's share", *(number(share, ".1%") for share in shares)))
    rows.append(("MFU", *(number(record["mfu"], ".1%") for record in records)))
    words = paragraph(
        f"Milliseconds of an optimizer step, and launches ({records[0]['device']}).",
        "The whole step is the median of steps that are not profiled.",
        ""
        if all(map(_is_recent, records))
        else "Columns with `before` are of a version without CUDA graphs and without an exact master.",
    )
    return f"{words}\n{table(('kind of kernel', *map(_run_label, records)), rows)}"


def _run_label(record: dict[str, Any]) -> str:
    return f"`{record['model']}`, {record['seq_len']:,}" + ("" if _is_recent(record) else ", before")


def _is_recent(record: dict[str, Any]) -> bool:
    """Whether CUDA graphs existed when a run was measured."""
    return record.get("cuda_graph") is not None


def peer_table(records: Records) -> str:
    """What was compared, and a row per case and implementation."""
    words = paragraph(
        "The peer is what one would write today: a Llama of `transformers` with Liger's operations. Both have the",
        "same weights (`1b3` with a vocabulary of 32,768), tokens and AdamW, in bf16, with one document per row.",
        "Where ours keeps less for the backward, the peer checkpoints its layers. Ours runs in Lightning's `Trainer`,",
        "with the norm of the gradients and logging.",
        f"The losses of every step agree within 0.5 % ({records[0]['gpu']}).",
        peer_memory(records),
    )
    rows = [
        (
            f"{record['seq_len']:,}",
            record["memory"],
            PEERS[record["implementation"]],
            number(record.get("tokens_per_second"), ",.0f"),
            number(record.get("mfu"), ".1%"),
            number(record.get("peak_memory_gib"), ".1f"),
            joined([milliseconds(record, part) for part in PARTS], ",.0f"),
            number(milliseconds(record, "attention"), ",.0f"),
            number(record.get("ratio_to_transformers"), ".2f"),
        )
        for record in records
    ]
    parts = f"{' · '.join(PARTS)} (ms)"
    header = ("tokens", "memory", "", "tokens/s", "MFU", "peak GiB", parts, "attention (ms)", "ratio")
    return f"{words}\n{table(header, rows)}"


def peer_memory(records: Records) -> str:
    """What to say about the rows for which the peer takes less memory; empty if there are none."""
    peaks: dict[tuple[int, str], dict[str, float | None]] = {}
    for record in records:
        place = peaks.setdefault((record["seq_len"], record["memory"]), {})
        place[record["implementation"]] = record.get("peak_memory_gib")
    less = [
        f"{seq_len:,}"
        for (seq_len, memory), found in peaks.items()
        if memory == "selective" and (found.get("transformers") or math.inf) < (found.get("flash_train") or 0)
    ]
    if not less:
        return ""
    return (
        f"With {' and '.join(less)} tokens the peer takes less memory, because it recomputes every layer from its "
        "input. With `memory=selective` ours also keeps the output of attention, and does not compute it again."
    )


def attention_functions_table(records: Records) -> str:
    """A row per dropout and attention of `transformers`."""
    first = records[0]
    words = (
        "Training a Llama of 1.3 B parameters in bf16 with each attention, on packed rows of\n"
        f"{first['seq_len']:,} tokens with log-normal document lengths. The rest is the same: Liger's operations,\n"
        "gradient checkpointing, fused AdamW, and the arguments that `DataCollatorWithFlattening` gives. The\n"
        "losses agree within 0.5 %, and hidden states are at most twice as far from fp32 as with `sdpa`.\n"
        "PyTorch's `varlen_attn` has no dropout.\n\n"
    )
    rows = [
        (
            number(record["dropout"], "g"),
            "this project" if record["implementation"] == "flash_train" else f"`{record['implementation']}`",
            number(record.get("tokens_per_second"), ",.0f"),
            number(record.get("peak_memory_gib"), ".1f"),
            f"{record['hidden_error']:.2e}",
            number(record.get("ratio_to_fastest_peer"), ".2f"),
        )
        for record in records
    ]
    return words + table(
        ("dropout", "attention", "tokens/s", "peak GiB", "error to fp32", "to the fastest other"), rows
    )


def peer_summary(records: Records) -> str:
    """A row per case, both implementations in it."""
    words = paragraph(
        "Training 1.3 B parameters in bf16, compared with a Llama of `transformers` with Liger's operations.",
        f"The losses agree within 0.5 % ({records[0]['gpu']}).",
        peer_memory(records),
    )
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        by_case.setdefault(record["case"], {})[record["implementation"]] = record
    rows = []
    for found in by_case.values():
        both = [found.get(name, {}) for name in PEERS]
        first = next(iter(found.values()))
        rows.append(
            (
                f"{first['seq_len']:,}",
                first["memory"],
                *(number(one.get("tokens_per_second"), ",.0f") for one in both),
                number(both[0].get("ratio_to_transformers"), ".2f"),
                *(number(one.get("mfu"), ".1%") for one in both),
                *(number(one.get("peak_memory_gib"), ".1f") for one in both),
            )
        )
    header = ("seq_len", "memory=", "tokens/s", "peer's", "ratio", "MFU", "peer's", "peak GiB", "peer's")
    return f"{words}\n{table(header, rows, left=2)}"


def milliseconds(record: dict[str, Any], part: str) -> float | None:
    seconds = record.get(f"{part}_seconds")
    return None if seconds is None else seconds * 1e3
