"""Profiled steps of a run: which steps are profiled, and the report on the kernels of each."""

import gzip
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from flash_train.cli.components.loggers import log_artifact
from flash_train.cli.run.build import Run
from flash_train.cli.run.memory_files import settings, unwritten_is_said
from flash_train.files import write_bytes, write_json, write_text
from flash_train.profiling.step_kernels import markdown, report, summary
from flash_train.records import device_name, versions
from flash_train.training.callbacks import KernelTimes, ProfiledStep


def profile_every(steps: int, config: DictConfig, run: Run, run_dir: Path) -> None:
    """Profile one step out of `steps`, and write the report on each to its own folder."""

    def write(profiled: ProfiledStep) -> None:
        folder = run_dir / "kernels" / f"step-{profiled.step:06}"
        with unwritten_is_said(folder):
            write_kernels(config, run, profiled, folder)

    run.trainer.callbacks.append(KernelTimes(write, every=steps))  # type: ignore[attr-defined]


def write_kernels(config: DictConfig, run: Run, profiled: ProfiledStep, folder: Path) -> None:
    """Write `kernels.json`, `kernels.md` and `trace.json.gz`, log them to W&B, and print a line."""
    chosen = settings(config, run)
    found = report(profiled.kernels, profiled.seconds)
    title = f"{chosen['model']}, {chosen['seq_len']:,} tokens, {chosen['precision']}, {chosen['attention']}"
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("kernels.json", "kernels.md", "trace.json.gz")]
    write_json(written[0], {"settings": chosen, **found, "device": device_name(run.device), "versions": versions()})
    write_text(written[1], markdown(found, f"Kernels of a training step: {title}"))
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        profiled.profile.export_chrome_trace(str(trace))
        write_bytes(written[2], gzip.compress(trace.read_bytes(), compresslevel=6))
    log_artifact(run.logger, "kernels", written)
    print(f"{summary(found)}\n{folder}: {', '.join(path.name for path in written)}")
