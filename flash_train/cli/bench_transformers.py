"""A Llama of transformers with each attention, trained on one GPU: ``python scripts/bench_transformers.py --out FILE``.

Everything but attention is the same: 1.3 B weights in bf16, liger-kernel's operations, fused AdamW, and one packed row
of documents, as ``DataCollatorWithFlattening`` gives it. Layers are checkpointed; without that, the masks of ``sdpa``
fill the card. The attentions are ours, ``sdpa``, and PyTorch's ``varlen_attn``, which has no dropout. They take turns
in one process: an untimed step each, then a timed one.

A rate is recorded only if the model's hidden states are at most twice as far from those in fp32 as with ``sdpa``, and
the losses of all steps agree. FILE is written after every case. The exit status is 0 only if all have their rates.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_train.cli.bench.records import (
    COMPARED_VERSIONS,
    LOSS_TOLERANCE,
    Records,
    add_options,
    environment_of,
    measure_cases,
    selected_cases,
)
from flash_train.cli.config.environment import grow_segments
from flash_train.cli.config.errors import ArgumentParser, UnavailableError, one_line_errors
from flash_train.integrations.transformers import register
from flash_train.profiling.attention.cases import log_normal_lengths
from flash_train.records import memory_use, peak_memory, reset_peak_memory

VOCAB_SIZE = 32768
HIDDEN_TOLERANCE = 2.0  # times the error with sdpa
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class TransformersCase:
    seq_len: int
    dropout: float
    rounds: int

    @property
    def name(self) -> str:
        return f"packed-n{self.seq_len}-p{self.dropout:g}"

    @property
    def implementations(self) -> tuple[str, ...]:
        return ("flash_train", "sdpa", "varlen_attn") if self.dropout == 0 else ("flash_train", "sdpa")


CASES = (TransformersCase(32768, 0.0, 3), TransformersCase(32768, 0.1, 3))


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with PyTorch's kernel for packed documents: an attention function of transformers.

    Args:
        query, key, value: (1, heads, seq_len, head_dim).
        cu_seq_lens_q: int32 (documents + 1,), the documents' boundaries.
        max_length_q: tokens of the longest document.

    Returns:
        (1, seq_len, heads, head_dim), and None in the place of the attention weights.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert dropout == 0
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max_length_q
    out: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, window_size=(-1, 0), scale=scaling)
    return out[None], None


def register_all() -> dict[str, str]:
    """Return the names of the implementations in transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("varlen_peer", varlen_attention)
    AttentionMaskInterface.register("varlen_peer", lambda *_, **__: None)
    return {"flash_train": register(), "sdpa": "sdpa", "varlen_attn": "varlen_peer"}


def row_of(case: TransformersCase, device: torch.device) -> dict[str, Any]:
    """One packed row, with the arguments that transformers' collator makes of it."""
    lengths = log_normal_lengths(case.seq_len)
    tokens = torch.randint(0, VOCAB_SIZE, (1, case.seq_len), generator=torch.Generator().manual_seed(1)).to(device)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return {
        "input_ids": tokens,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def build_model(device: torch.device) -> Any:
    """A Llama with random weights."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    if device.type == "cuda":
        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).train()


@torch.no_grad()
def hidden_states(model: Any, row: dict[str, Any]) -> Tensor:
    """The model's last hidden states, float32 (seq_len, width)."""
    return model.model(**row).last_hidden_state[0].float()


class Turns:
    """One model, one optimizer, and the attentions in turn."""

    def __init__(self, model: Any, names: dict[str, str], row: dict[str, Any]) -> None:
        self.model, self.names, self.row = model, names, row
        # Every step computes an update and adds 0 of it, so that all attentions have the same weights
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def use(self, implementation: str) -> None:
        self.model.set_attn_implementation(self.names[implementation])

    def loss(self) -> Tensor:
        return self.model(**self.row, labels=self.row["input_ids"]).loss

    def step(self) -> tuple[float, float]:
        """Take a step; return the loss before the update, and the step's seconds."""
        _synchronize()
        start = time.perf_counter()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        _synchronize()
        return loss.item(), time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(case: TransformersCase, environment: dict[str, str | None]) -> Records:
    """A record for each implementation: with rates if it is right, else with a `reason`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, row = register_all(), row_of(case, device)
    model = build_model(device).to(torch.bfloat16).float()
    model.set_attn_implementation("sdpa")
    exact = hidden_states(model, row)
    turns = Turns(model.to(torch.bfloat16), names, row)
    records: dict[str, dict[str, Any]] = {}
    losses: dict[str, list[float]] = {name: [] for name in case.implementations}
    seconds: dict[str, list[float]] = {name: [] for name in case.implementations}
    for name in case.implementations:
        turns.use(name)
        records[name] = {"case": case.name, "implementation": name, "seq_len": case.seq_len, "dropout": case.dropout}
        records[name] |= {key: environment[key] for key in COMPARED_VERSIONS}
        records[name]["hidden_error"] = float((hidden_states(model, row) - exact).square().mean().sqrt())
        with torch.no_grad():
            losses[name].append(float(turns.loss()))
    del exact
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = case.dropout
    for _ in range(case.rounds):
        for name in case.implementations:
            turns.use(name)
            reset_peak_memory(device)
            turns.step()
            loss, taken = turns.step()
            seconds[name].append(taken)
            losses[name].append(loss)
            records[name]["peak_memory_gib"] = peak_memory(memory_use(device))
    del turns, model
    gc.collect()
    return _judged(case, records, losses, seconds)


def _judged(
    case: TransformersCase,
    records: dict[str, dict[str, Any]],
    losses: dict[str, list[float]],
    seconds: dict[str, list[float]],
) -> Records:
    plain = records["sdpa"]
    for name, record in records.items():
        errors = [abs(a - b) / abs(b) for a, b in zip(losses[name], losses["sdpa"], strict=True)]
        record |= {"first_loss": losses[name][0], "loss_difference": max(errors)}
        if not record["hidden_error"] <= HIDDEN_TOLERANCE * plain["hidden_error"]:  # NaN fails too
            record["reason"] = f"hidden states have an error of {record['hidden_error']:.1e}"
        elif not all(error <= LOSS_TOLERANCE for error in errors):
            record["reason"] = f"the losses differ by {max(errors):.1e}"
        else:
            record["step_seconds"] = statistics.median(seconds[name])
            record["tokens_per_second"] = case.seq_len / record["step_seconds"]
    rates = {name: record.get("tokens_per_second") for name, record in records.items()}
    peers = [rate for name, rate in rates.items() if name != "flash_train" and rate]
    if rates["flash_train"] and peers:
        records["flash_train"]["ratio_to_fastest_peer"] = rates["flash_train"] / max(peers)
    return list(records.values())


def shown(records: Records) -> str:
    figures = [
        f"{record['implementation']} "
        + (f"{record['tokens_per_second']:,.0f} tok/s" if "reason" not in record else f"none ({record['reason']})")
        for record in records
    ]
    ratio = records[0].get("ratio_to_fastest_peer")
    return ", ".join(figures) + (f"; ratio {ratio:.3f}" if ratio else "")


def unavailable() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return "bench_transformers: needs an NVIDIA GPU, and there is none"
    missing = [name for name in ("transformers", "liger_kernel") if importlib.util.find_spec(name) is None]
    return f"bench_transformers: needs {' and '.join(missing)}: pip install -e '.[test]'" if missing else None


@one_line_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, page="docs/transformers.md#how-fast-it-is")
    add_options(parser)
    options = parser.parse_args(arguments)
    wanted = selected_cases(parser, options, CASES)
    if reason := unavailable():
        raise UnavailableError(reason)
    grow_segments()
    environment = environment_of(options.commit)
    records = measure_cases(options, CASES, wanted, environment, partial(measure, environment=environment), shown)
    return int(any("reason" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
