"""Tables of training on one GPU: the measured runs, and the comparison with a peer."""

from typing import Any

from flash_train.records.markdown import joined, number
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
    """A row per run of one step over a single document."""
    rows = [
        (
            f"`{record['model']}`",
            number(record["seq_len"], ","),
            f"`{record['memory']}`",
            f"{record['master'] or 'exact'}, {record['moments'] or 'bf16'}"
            + ", on the host" * record["optimizer_offload"],
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
    return f"One step over a row that is a single document ({records[0]['device']}):\n\n" + table(header, rows, left=1)


def fp8_table(records: Records) -> str:
    """A row per precision and recipe; the first record in bf16-true is what the others are compared with."""
    (plain,) = [record for record in records if record["precision"] == "bf16-true"]
    rows = [
        (
            f"`{record['precision']}`" + (f", `{record['recipe']}`" if record is not plain else ""),
            number(record["tokens_per_second"], ",.0f"),
            number(record["tokens_per_second"] / plain["tokens_per_second"], ".2f"),
            number(record["mfu"], ".1%"),
            number(record["train_loss_last_10"], ".4f"),
            number(record["train_loss_last_10"] / plain["train_loss_last_10"] - 1, "+.2%"),
        )
        for record in (plain, *(record for record in records if record is not plain))
    ]
    words = f"`{plain['model']}` with {plain['seq_len']:,} tokens, {plain['steps']} steps ({plain['device']}):\n\n"
    header = ("precision", "tokens/s", "ratio", "MFU", "loss, last 10 steps", "difference")
    return words + table(header, rows, left=1)


def updates_table(records: Records) -> str:
    """A row per way to keep the weights of a model that is tuned on; first what it was before."""
    (start,) = [record for record in records if record["model"] != "pretrained"]
    (fp32,) = [record for record in records if record["model"] == "pretrained" and record["precision"] != "bf16-true"]
    tuned = [record for record in records if record["precision"] == "bf16-true"]
    gain = start["val_loss"] - fp32["val_loss"]
    words = (
        f"`{start['model']}` was trained for {start['steps']} steps of `data=stdlib` in `{start['precision']}`,\n"
        f"and then tuned for {fp32['steps']} more with `optimizer.lr=2e-5` ({start['device']}).\n"
        f"Validation loss before: {start['val_loss']:.4f}.\n\n"
    )
    rows = [
        (
            f"`{record['precision']}`",
            f"`{record['master']}`" if record["master"] else "fp32 weights",
            number(record["val_loss"], ".4f"),
            number(record["val_loss"] / fp32["val_loss"] - 1, "+.2%"),
            number((start["val_loss"] - record["val_loss"]) / gain, ".0%"),
        )
        for record in sorted([fp32, *tuned], key=lambda record: record["val_loss"])
    ]
    header = ("precision", "`optimizer.master`", "validation loss", "to fp32 weights", "share of their progress")
    return words + table(header, rows, left=2)


def peer_table(records: Records) -> str:
    """What was compared, and a row per case and implementation."""
    words = (
        "The peer is what one would write today: a Llama of `transformers` with Liger's operations. Both have the\n"
        "same weights (`1b3` with a vocabulary of 32,768), tokens and AdamW, in bf16, with one document per row.\n"
        "Where ours keeps less for the backward, the peer checkpoints its layers. Ours runs in Lightning's `Trainer`,\n"
        "with the norm of the gradients and logging. The losses of every step agree within 0.5 %\n"
        f"({records[0]['gpu']}).\n\n"
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
    return words + table(
        ("tokens", "memory", "", "tokens/s", "MFU", "peak GiB", parts, "attention (ms)", "ratio"), rows
    )


def attention_functions_table(records: Records) -> str:
    """A row per dropout and attention of `transformers`."""
    first = records[0]
    words = (
        "Training a Llama of 1.3 B parameters in bf16 with each attention, on packed rows of\n"
        f"{first['seq_len']:,} tokens with log-normal document lengths. The rest is the same: Liger's operations,\n"
        "gradient checkpointing, fused AdamW, and the arguments that `DataCollatorWithFlattening` gives. The\n"
        "losses agree within 0.5 %, and hidden states are at most twice as far from fp32 as with `sdpa`.\n"
        f"PyTorch's `varlen_attn` has no dropout ({first['gpu']}, torch {first['torch']}).\n\n"
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
    words = (
        "Training 1.3 B parameters in bf16, compared with a Llama of `transformers` with Liger's operations. With\n"
        "`memory=selective` the peer checkpoints its layers. The losses agree within 0.5 % "
        f"({records[0]['gpu']}):\n\n"
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
    header = ("seq_len", "memory=", "tokens/s", "peer", "ratio", "MFU", "peer", "peak GiB", "peer")
    return words + table(header, rows, left=2)


def milliseconds(record: dict[str, Any], part: str) -> float | None:
    seconds = record.get(f"{part}_seconds")
    return None if seconds is None else seconds * 1e3
