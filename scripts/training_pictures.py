"""Two pictures of the documentation site: what a resumed run repeats, and which FLOPs count for MFU."""

from collections.abc import Sequence
from string import ascii_uppercase as LETTERS

import torch
from svg_drawing import GREY, INK, PALE, PALETTE, PURPLE, Drawing

from flash_train.attention.flops import attended_pairs
from flash_train.data.order.sampler import EndlessBatchSampler, EndlessOrder, PlacedOrder
from flash_train.model import ModelConfig, Transformer
from flash_train.training.callbacks.step_seed import seed_of_rows

CAPTIONS = {
    "resume.svg": "The steps of a run and of a run that was stopped and resumed: the rows of a step and the seed of "
    "its dropout are functions of the run's seed and of the step, so the resumed run has the same ones.",
    "mfu.svg": "The model FLOPs of a packed row: linear layers by tokens, attention by the pairs within each document; "
    "counted as one document, attention would have several times as many.",
}


def resume(rows: int, batch_size: int, steps: int, stop: int, seed: int) -> str:
    """The rows and dropout seeds of a whole run, of a run up to a checkpoint, and of the run that continues it."""
    drawing = Drawing(452, CAPTIONS["resume.svg"])
    left, wide = 150, 530 / steps

    def batches(first_step: int, count: int) -> list[list[tuple[int, int]]]:
        order = PlacedOrder(EndlessOrder(rows, seed=seed))
        sampler = EndlessBatchSampler(order, batch_size, rank=0, world_size=1, first_row=first_step * batch_size)
        return [batch for batch, _ in zip(sampler, range(count), strict=False)]

    def lane(y: float, words: str, first_step: int, count: int) -> None:
        if words:
            drawing.text(20, y + 32, words, bold=True)
        for step, batch in enumerate(batches(first_step, count), first_step):
            x = left + wide * step
            drawing.rect(x + 3, y, wide - 6, 92, PALE)
            for i, (_, row) in enumerate(batch):
                side = (wide - 18) / batch_size
                drawing.box(x + 9 + side * i, y + 8, side, 40, PALETTE[row % len(PALETTE)], str(row), 20)
            dropout = seed_of_rows(seed, [place for place, _ in batch])
            drawing.text(x + wide / 2, y + 78, f"{dropout % 16**4:04x}", 20, "middle", GREY)

    drawing.text(20, 36, f"{rows} rows, {batch_size} in a step", bold=True)
    for step in range(steps):
        drawing.text(left + wide * (step + 0.5), 76, f"step {step + 1}", 20, "middle")
    lane(92, "whole run", 0, steps)
    lane(212, "stopped", 0, stop)
    lane(212, "", stop, steps - stop)
    drawing.text(20, 268, "and resumed", bold=True)
    x = left + wide * stop
    drawing.line([(x, 204), (x, 312)], INK, 4)
    drawing.text(x, 338, "checkpoint: weights, optimizer, place in the order", 20, "middle")
    drawing.text(20, 386, "boxes: rows = order(seed, place)")
    drawing.text(20, 416, "below: dropout = function of (seed, place), the last digits", fill=GREY)
    return drawing.svg()


def mfu(lengths: Sequence[int], config: ModelConfig, name: str) -> str:
    """The FLOPs of a packed row, and of a row that is one document."""
    drawing = Drawing(410, CAPTIONS["mfu.svg"])
    tokens = sum(lengths)
    with torch.device("meta"):
        model = Transformer(config, attention="sdpa")
    linear = model.model_flops(tokens, 0)
    each = [model.model_flops(0, attended_pairs([length])) for length in lengths]
    whole = model.model_flops(0, attended_pairs([tokens]))
    drawing.text(20, 36, f"{name}: one row of {tokens:,} tokens, {len(lengths)} documents", bold=True)
    x = 20.0
    for document, length in enumerate(lengths):
        size = 660 * length / tokens
        drawing.box(x, 52, size, 40, PALETTE[document], f"{LETTERS[document]}: {length:,}", 18)
        x += size

    scale = 480 / (linear + whole)
    for y, words, parts in (
        (134, "counted for MFU", [("linear layers", linear, GREY), *zip(LETTERS, each, PALETTE, strict=False)]),
        (226, "as one document", [("linear layers", linear, GREY), ("attention", whole, PURPLE)]),
    ):
        drawing.text(20, y, words, bold=True)
        x = 20.0
        for label, flops, color in parts:
            drawing.box(x, y + 12, scale * flops, 44, color, label, 18)
            x += scale * flops
        drawing.text(x + 10, y + 42, f"{sum(flops for _, flops, _ in parts) / 1e12:.0f} TFLOP")
    drawing.text(20, 330, "linear layers: 6 per weight and token")
    drawing.text(20, 358, "attention: 12 per layer, head, pair and element of a head")
    drawing.text(20, 386, "MFU = FLOPs / (seconds × dense peak of the card)", bold=True)
    return drawing.svg()
