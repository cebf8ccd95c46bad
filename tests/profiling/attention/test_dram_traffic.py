"""The output of `ncu --csv`, read without a GPU, and the reasons given if there is no measurement."""

import subprocess

import pytest

from flash_train.profiling.attention import dram_traffic
from flash_train.profiling.attention.dram_traffic import Unmeasured, measure, total

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(kernel: int, metric: str, value: str, unit: str = "byte") -> str:
    place = f'"{kernel}","4711","python3.12","127.0.0.1","attention_forward(int, float *)","1","7"'
    launch = '"(128, 1, 1)","(512, 16, 1)","0","9.0","Command line profiler metrics"'
    return f'{place},{launch},"{metric}","{unit}","{value}"'


SAMPLE = "\n".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "attention_forward" - 0: 0%....50%....100% - 1 pass',
        "a line of the process itself",
        "==PROF== Disconnected from process 4711",
        HEADER,
        row(0, "dram__bytes_read.sum", "134,217,728"),
        row(0, "dram__bytes_write.sum", "67,108,864"),
        row(1, "dram__bytes_read.sum", "1.5", "Mbyte"),
        row(1, "dram__bytes_write.sum", "256"),
        row(1, "sm__cycles.sum", "99", "cycle"),
    ]
)


def test_bytes_are_summed_over_kernels():
    assert total(SAMPLE) == {"read": 134_217_728 + 1_500_000, "write": 67_108_864 + 256, "kernels": 2}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("==PROF== Connected\n==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        (HEADER + "\n", "recorded no kernel"),
        ("", "recorded no kernel"),
    ],
)
def test_output_without_kernels_is_unmeasured(output, said):
    with pytest.raises(Unmeasured, match=said):
        total(output)


def test_missing_ncu_is_reported(monkeypatch):
    monkeypatch.setattr(dram_traffic.shutil, "which", lambda name: None)
    with pytest.raises(Unmeasured, match="ncu is not installed"):
        measure("flash", 4096, "forward")


def test_ncu_command_and_its_failure(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        error = "==ERROR== ERR_NVGPUCTRPERM: the user may not read the counters\n"
        return subprocess.CompletedProcess(command, 1, stdout=error, stderr="a last line\n")

    monkeypatch.setattr(dram_traffic.shutil, "which", lambda name: "/opt/ncu")
    monkeypatch.setattr(dram_traffic.subprocess, "run", run)
    with pytest.raises(Unmeasured, match="ERR_NVGPUCTRPERM"):
        measure("standard", 4096, "backward")
    (command,) = commands
    assert command[0] == "/opt/ncu" and command[-3:] == ["standard", "4096", "backward"]
    assert command[command.index("--metrics") + 1] == "dram__bytes_read.sum,dram__bytes_write.sum"
