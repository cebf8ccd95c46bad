"""On a card: a rehearsal and then a step of training; prints as JSON what each compiled, and what stays in memory.

A script, run by a test: nothing may have been compiled in its process before.
"""

import json

import torch
from triton import knobs

from flash_train.attention import Packing
from flash_train.cli.compose import compose_config
from flash_train.cli.rehearsal import rehearsed
from flash_train.cli.shape import build_model_config
from flash_train.model import Transformer

compiled: list[tuple[str, str]] = []


def step(model: Transformer, seq_len: int) -> None:
    tokens = torch.zeros((1, seq_len), dtype=torch.int64, device="cuda")
    cu_seqlens = torch.tensor([0, seq_len], dtype=torch.int32, device="cuda")
    loss, _ = model.loss(tokens, tokens, packing=Packing(cu_seqlens, cu_seqlens))
    loss.backward()
    torch.cuda.synchronize()


def workspaces(model: Transformer, seq_len: int) -> int:
    """Bytes of cuBLAS's that stay behind a step, which another step shows."""
    before = torch.cuda.memory_allocated()
    step(model, seq_len)
    model.zero_grad()
    return torch.cuda.memory_allocated() - before


def main() -> None:
    knobs.compilation.listener = lambda *, metadata, **_: compiled.append((metadata["name"], metadata["hash"]))
    config = compose_config(("model=125m", "precision=bf16-true", "seq_len=2048"))
    with rehearsed(config):
        pass
    kept, before = torch.cuda.memory_allocated(), list(compiled)
    model = Transformer(build_model_config(config, 259, None), attention="flash").to("cuda", torch.bfloat16)
    more = workspaces(model, config.seq_len)
    told = {
        "rehearsed": [name for name, _ in before],
        "forms": before,
        "in the step": [name for name, _ in compiled[len(before) :]],
        "kept": kept,
        "workspaces of the step": more,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
