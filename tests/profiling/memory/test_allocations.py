"""The history of the CUDA allocator, a list of dictionaries: allocated bytes over time, and the module that ran."""

from itertools import groupby

import torch

from flash_train.model import ModelConfig, Transformer
from flash_train.profiling.memory import allocations
from flash_train.profiling.memory.allocations import Event, Recording, Scopes, events_of, profile_of


def entry(action: str, address: int, size: int, time_us: int) -> dict:
    """As `torch.cuda.memory._snapshot()["device_traces"][device]` has them."""
    place = {"device_free": address} if action == "oom" else {"addr": address}
    return {"action": action, "size": size, "stream": 0, "time_us": time_us, "pool_id": (0, 0), "frames": [], **place}


def test_allocations_count_whole_blocks():
    trace = [
        entry("segment_alloc", 4096, 2 << 20, 10),
        entry("alloc", 4096, 1000, 11),
        entry("alloc", 8192, 512, 11),
        entry("snapshot", 0, 0, 12),
        entry("free_requested", 4096, 1000, 13),
        entry("free_completed", 4096, 1000, 14),
        entry("alloc", 4096, 1, 15),
        entry("oom", 77, 1 << 40, 16),
        entry("segment_free", 4096, 2 << 20, 17),
    ]
    assert list(events_of(trace)) == [
        Event(11_000, 4096, 1024),
        Event(11_000, 8192, 512),
        Event(13_000, 4096, -1024),
        Event(15_000, 4096, 512),
    ]


def test_backward_visits_the_modules_in_order():
    """Also if a module returns its input, as a norm that adds nothing returns the residual stream."""
    config = ModelConfig(64, n_layers=2, width=32, n_heads=2, n_kv_heads=2, head_dim=16, mlp_width=64)
    model, scopes = Transformer(config, attention="sdpa"), Scopes()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with scopes.watching(model):
        scopes.begin("forward")
        loss, _ = model.loss(tokens, tokens)
        scopes.begin("backward")
        loss.backward()
    names = [name for name, _ in groupby(name for _, phase, name in scopes.entries if phase == "backward")]
    mlp = (".mlp.down", ".mlp", ".mlp.up", ".mlp.gate", ".mlp_norm")
    attention = (".out", "", ".call", ".v", ".k", ".q")
    block = ["", *mlp, *(f".attention{part}" for part in attention), ".attention_norm"]
    assert names == ["", "norm", *(f"blocks.{i}{part}" for i in (1, 0) for part in block), "embedding"]


def test_system_clock_may_differ_from_the_profilers(monkeypatch):
    config = ModelConfig(64, n_layers=3, width=32, n_heads=2, n_kv_heads=2, head_dim=16, mlp_width=64)
    model, tokens = Transformer(config, attention="sdpa"), torch.zeros(1, 8, dtype=torch.int64)

    def kept_by_block() -> dict[str, int]:
        recording = Recording(torch.device("cpu"), [])
        with recording.recording(model):
            recording.scopes.begin("forward")
            loss, _ = model.loss(tokens, tokens)
            recording.scopes.begin("backward")
            loss.backward()
            recording.scopes.begin("end")
        return profile_of(recording, model, 4).kept_by_block

    right = kept_by_block()
    now = allocations.time.time_ns
    monkeypatch.setattr(allocations.time, "time_ns", lambda: now() + 1_000_000)
    assert kept_by_block() == right and len(right) == 3 and len(set(right.values())) == 1
