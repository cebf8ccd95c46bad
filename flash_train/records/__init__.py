"""The records of a run: hardware facts, memory figures, metrics and plots."""

from flash_train.records.hardware import device_name, peak_flops, versions
from flash_train.records.memory_use import memory_use, peak_memory, reset_peak_memory
from flash_train.records.metrics import MetricsTable, read_column
from flash_train.records.plots import plot_run

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
]
