"""The memory of a training step, measured by PyTorch's profiler on a CPU."""

from contextlib import nullcontext

import torch

from flash_train.attention import Packing
from flash_train.model import Transformer
from flash_train.optim import step_in_backward
from flash_train.profiling.memory.allocations import Recording, profile_of
from flash_train.profiling.memory.step import Step
from flash_train.training.optimizer import OptimizerConfig, build_adamw


def measured(step: Step):
    """Measure the second optimizer step, as `CausalLMModule` runs it: gradients are freed after they are used."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if step.precision == "bf16-true" else torch.float32
    kept = {"memory": step.memory, "keep": step.keep, "offload": step.offload}
    model = Transformer(step.model, attention=step.attention, **kept).to(dtype)
    clip = None if step.in_backward else 1.0
    optimizer = build_adamw(model, OptimizerConfig(gradient_clip=clip, in_backward=step.in_backward))
    n = step.seq_len
    tokens, labels = (torch.randint(step.model.vocab_size, (1, n)) for _ in "ab")
    positions, cu = torch.arange(n)[None], torch.tensor([0, n], dtype=torch.int32)
    context = {"positions": positions, "packing": Packing(cu, cu, lengths=(n,))}

    def take(recording=None):
        begin = recording.scopes.begin if recording else lambda phase: None
        for _ in range(step.accumulate):
            begin("forward")
            with torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bf16-mixed", cache_enabled=False):
                adds = model.adding_gradients() if step.accumulate > 1 else nullcontext()
                with adds:
                    loss, _ = model.loss(tokens, labels, **context)
            begin("backward")
            with step_in_backward(optimizer) if step.in_backward else nullcontext():
                loss.backward()
        begin("step")
        optimizer.step()
        optimizer.zero_grad()
        begin("end")

    take()
    owned = [
        *(("weights", p) for p in model.parameters()),
        *(("optimizer state", t) for state in optimizer.state.values() for t in state.values()),
        *(("batch and tables", t) for t in (tokens, labels, positions)),
    ]
    recording = Recording(torch.device("cpu"), owned)
    with recording.recording(model):
        take(recording)
    return profile_of(recording, model, 4 if step.precision == "fp32" else 2)
