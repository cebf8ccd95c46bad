"""The page of the documentation that helps with a key of the configuration."""

from __future__ import annotations

import re

#: beginnings of keys, and their pages; the first that fits counts
PAGES = (
    ("trainer.cuda_graph", "train.md#cuda-graphs"),
    ("trainer.checkpoint", "resume.md#checkpoints"),
    ("trainer.keep_checkpoints", "resume.md#checkpoints"),
    ("trainer.async_checkpoints", "resume.md#checkpoints"),
    ("trainer.deterministic", "resume.md"),
    ("trainer.accelerator", "train.md#hardware"),
    ("trainer.devices", "several_gpus.md"),
    ("trainer.num_nodes", "several_gpus.md"),
    ("trainer.strategy", "several_gpus.md"),
    ("parallel", "several_gpus.md"),
    ("global_batch", "several_gpus.md"),
    ("memory", "train.md#memory-modes"),
    ("attention", "train.md#attention-backends"),
    ("precision_fp8", "train.md#fp8"),
    ("precision", "train.md#precision-and-optimizer"),
    ("hardware", "train.md#hardware"),
    ("optimizer", "train.md#precision-and-optimizer"),
    ("compile", "train.md#what-to-measure-on-request"),
    ("callbacks", "train.md#what-to-measure-on-request"),
    ("data", "data.md"),
    ("model.rope", "models.md#start-from-a-model"),
    ("model", "train.md#model-sizes"),
    ("init_from", "models.md#start-from-a-model"),
    ("resume", "resume.md"),
    ("run_dir", "resume.md"),
    ("sweep", "ablation.md"),
    ("find_max", "memory.md#the-longest-row-that-trains"),
    ("logger", "train.md#the-files-of-a-run"),
    *((key, "choosing.md#batch-size-and-accumulation") for key in ("seq_len", "batch_size", "accumulate")),
    ("stop_after", "resume.md"),
    ("validate_only", "resume.md#validate-only"),
    ("log_every", "train.md#what-to-measure-on-request"),
    ("val_every", "train.md#what-to-measure-on-request"),
    ("force", "memory.md#before-a-run"),
    *((key, "configuration.md") for key in ("max_steps", "seed", "trainer", "experiment")),
)
OUT_OF_MEMORY = "questions.md#my-run-is-refused-or-memory-runs-out-what-now"
#: "seq_len=3", "model.width must …"; only at the start of a word, as paths such as "runs/precision=fp32" have keys, too
KEY = re.compile(r"(?<!\S)([a-z_]+\d*(\.[a-z_]+)*(?==)|[a-z_]+\d*(\.[a-z_]+)+)")


def page_of(message: str) -> str | None:
    """Return the page for the first key that a message names; None if it names none, or an argument without a page."""
    found = KEY.search(message)
    pages = (page for start, page in PAGES if found is not None and found[0].startswith(start))
    page = next(pages, None)
    return None if page is None else f"docs/{page}"
