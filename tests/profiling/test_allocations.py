"""What is read out of a CUDA allocator's history; needs no GPU, as a history is a list of dictionaries."""

from flash_train.profiling.allocations import Event, events_of


def entry(action: str, address: int, size: int, time_us: int) -> dict:
    """As `torch.cuda.memory._snapshot()["device_traces"][device]` has them."""
    place = {"device_free": address} if action == "oom" else {"addr": address}
    return {"action": action, "size": size, "stream": 0, "time_us": time_us, "pool_id": (0, 0), "frames": [], **place}


def test_tensors_come_and_go_in_whole_blocks():
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
