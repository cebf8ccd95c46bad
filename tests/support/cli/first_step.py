"""On a GPU: a warm-up and then a training step; prints as JSON what each compiled, and what stays in memory.

A test runs this script, because nothing may have been compiled in its process before.
"""

import json
import sys
from dataclasses import replace

import torch
from triton import knobs

from flash_train.attention import Packing
from flash_train.cli.components.model_config import build_model_config
from flash_train.cli.config.compose import compose_config
from flash_train.cli.run.warm_up import warming_up
from flash_train.model import Transformer

SEQ_LEN = 8192
compiled: list[tuple[str, str]] = []


def step(model: Transformer, boundaries: list[int]) -> None:
    tokens = torch.zeros((1, SEQ_LEN), dtype=torch.int64, device="cuda")
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
    loss, _ = model.loss(tokens, tokens, packing=Packing(cu_seqlens, cu_seqlens))
    loss.backward()
    torch.cuda.synchronize()


def workspaces(model: Transformer, boundaries: list[int]) -> int:
    """Bytes of cuBLAS's workspaces that stay after a step, measured by another step."""
    before = torch.cuda.memory_allocated()
    step(model, boundaries)
    model.zero_grad()
    return torch.cuda.memory_allocated() - before


def main() -> None:
    knobs.compilation.listener = lambda *, metadata, **_: compiled.append((metadata["name"], metadata["hash"]))
    config = compose_config(("precision=bf16-true", f"seq_len={SEQ_LEN}", "data=stdlib", *sys.argv[1:]))
    with warming_up(config):
        pass
    kept, before = torch.cuda.memory_allocated(), list(compiled)
    model = Transformer(replace(build_model_config(config, 259, None), n_layers=2), attention="flash")
    model = model.to("cuda", torch.bfloat16)
    boundaries = [0, SEQ_LEN] if config.data.packing == "concat" else [*range(0, SEQ_LEN, 300), *[SEQ_LEN] * 40]
    more = workspaces(model, boundaries)
    record = {
        "in the warm-up": [name for name, _ in before],
        "forms": before,
        "in the step": [name for name, _ in compiled[len(before) :]],
        "kept": kept,
        "workspaces of the step": more,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
