"""What was measured, on what, and how it is kept: hardware facts, memory figures, run records and plots."""

from flash_train.profiling.hardware import device_name, peak_flops, versions
from flash_train.profiling.memory import memory_use, peak_memory, reset_peak_memory
from flash_train.profiling.plots import plot_run
from flash_train.profiling.records import MetricsTable, read_column, write_json, write_text

__all__ = [
    "MetricsTable",
    "device_name",
    "memory_use",
    "peak_flops",
    "peak_memory",
    "plot_run",
    "read_column",
    "reset_peak_memory",
    "versions",
    "write_json",
    "write_text",
]
