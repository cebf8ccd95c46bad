"""Pictures of the documentation site. Each one is computed from the project's own functions.

`python scripts/site_pictures.py FOLDER` writes them to a folder. A picture is an SVG 700 units wide on a white card, so
that it reads the same on a light and on a dark page. Its `<title>` says what it shows.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any
from unittest import mock

import numpy as np
import torch
import training_pictures
import yaml
from svg_drawing import GREY, INK, PALE, PALETTE, Drawing
from torch import Tensor

from flash_train.attention import dropout as dropout_map
from flash_train.attention.flops import attended_pairs
from flash_train.attention.kernels.families import HOPPER
from flash_train.attention.kernels.hopper.tiles import FORWARD, ForwardTile
from flash_train.attention.kernels.tile_sizes import Tile
from flash_train.attention.masks import PARTIAL, SKIPPED, WHOLE, Causal, Document
from flash_train.attention.packing import Entry
from flash_train.attention.parallel.row_division import Piece, count_pairs
from flash_train.attention.parallel.row_plan import plan_row
from flash_train.data.packing import pack
from flash_train.model import ModelConfig
from flash_train.profiling.memory.ledger import PHASE_NAMES, Moment
from flash_train.profiling.memory.plot import COLORS, ORDER
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import GIB
from flash_train.records.plots import BLUE, ORANGE

ROOT = Path(__file__).parents[1]
TILE_COLORS = {SKIPPED: PALE, WHOLE: BLUE, PARTIAL: ORANGE}
#: by picture: what it shows, for its title and for the site's alternative text
CAPTIONS = {
    "packing.svg": "Documents of different lengths fill rows of the same number of tokens, and a document that is too "
    "long is cut; in the mask of a row, each token attends to itself and to earlier tokens of its own document.",
    "tiles.svg": "The attention matrix of one packed row in tiles: a kernel skips tiles in which no pair attends, runs "
    "full tiles without the mask, and evaluates the mask only in the partial tiles on the diagonal.",
    "dropout.svg": "A tile of 16 by 16 attention weights coloured by Philox call: one call gives the random bytes for "
    "four rows and four columns, which are two adjacent pairs at a distance of 8.",
    "memory.svg": "Predicted device memory over one training step, stacked by kind: activations grow in the forward "
    "and shrink in the backward, while gradients grow; weights and optimizer state stay.",
    "row_split.svg": "One packed row divided over devices: each device holds the same number of tokens and nearly the "
    "same number of attended pairs; a long document is cut into chunks, and a device that holds the n-th "
    "chunk also holds the n-th from the end.",
    "schedule.svg": "The forward kernel for Hopper over time: a producer warp loads blocks of keys and values into "
    "stages of shared memory; consumer warpgroups take turns: one multiplies while another exponentiates.",
    **training_pictures.CAPTIONS,
}


def pictures() -> dict[str, str]:
    """Return the text of each SVG by file name."""
    model = yaml.safe_load((ROOT / "conf" / "model" / "1b3.yaml").read_text(encoding="utf-8")) | {"vocab_size": 32768}
    name = model.pop("name")
    config = ModelConfig.from_dict({key: value for key, value in model.items() if value is not None})
    step = Step(
        config, 16384, precision="bf16-true", memory="selective", family=HOPPER.name,
    )  # fmt: skip
    return {
        "packing.svg": packing((21, 9, 6, 7, 5), 16),
        "tiles.svg": tiles((832, 608, 352, 256), FORWARD[128].as_tile),
        "dropout.svg": dropout(2, 4),
        "memory.svg": memory(step, name),
        "row_split.svg": row_split((2544, 16000, 2128, 2080, 2848, 2576, 1696, 2896), 4),
        "schedule.svg": schedule(FORWARD[128], 4),
        "resume.svg": training_pictures.resume(rows=5, batch_size=2, steps=6, stop=3, seed=0),
        "mfu.svg": training_pictures.mfu((7168, 4096, 2816, 2304), config, name),
    }


def packing(lengths: Sequence[int], seq_len: int) -> str:
    """Documents, the rows made of them, and the mask of the last row."""
    index = pack(np.array(lengths), seq_len)
    top_of_rows = 104 + 28 * len(lengths)
    drawing = Drawing(max(top_of_rows + 44 * len(index) + 44, 440), CAPTIONS["packing.svg"])
    cell = 340 / max(*lengths, seq_len)
    drawing.text(20, 38, f"{len(lengths)} documents", bold=True)
    for document, length in enumerate(lengths):
        y = 52 + 28 * document
        drawing.text(20, y + 18, LETTERS[document])
        for token in range(length):
            drawing.rect(46 + cell * token, y, cell - 1.5, 22, PALETTE[document])
        for start in index.starts[(index.documents == document) & (index.starts > 0)].tolist():
            x = 46 + cell * start - 0.75
            drawing.line([(x, y - 5), (x, y + 27)], INK, 3)
    drawing.text(20, top_of_rows - 14, f"{len(index)} rows of {seq_len} tokens", bold=True)
    for row in range(len(index)):
        x, y = 46.0, top_of_rows + 44 * row
        drawing.text(20, y + 24, str(row + 1))
        for document, _, length in index.row(row):
            drawing.box(x, y, cell * length, 36, PALETTE[document], f"{LETTERS[document]}: {length}", 20)
            x += cell * length
    drawing.text(20, drawing.height - 22, f"{100 * index.efficiency:.0f} % of the positions hold a token")

    segments = index.row(len(index) - 1)
    ids = [i for i, (_, _, length) in enumerate(segments) for _ in range(length)]
    ids += [len(segments)] * (seq_len - len(ids))  # the padding is an entry, too
    entry = Entry.of_lengths(seq_len, seq_len)
    mask = Causal() & Document(torch.tensor(ids, dtype=torch.int32))
    left, top, side = 446, 98, 238 / seq_len
    drawing.text(left - 18, 38, f"mask of row {len(index)}", bold=True)
    drawing.text(left + 119, 68, "keys", 20, "middle")
    drawing.text(left - 28, top + 119, "queries", 20, "middle", upwards=True)
    colors = [PALETTE[segments[i][0]] if i < len(segments) else GREY for i in ids]
    for i, row_of_mask in enumerate(mask.dense(entry)[0].tolist()):
        drawing.rect(left + side * i, top - 18, side - 1, 12, colors[i])
        drawing.rect(left - 18, top + side * i, 12, side - 1, colors[i])
        for j, attends in enumerate(row_of_mask):
            drawing.rect(left + side * j, top + side * i, side - 1, side - 1, colors[i] if attends else PALE)
    drawing.text(left - 18, top + 274, f"{mask.pairs(entry)} pairs attend, not")
    drawing.text(left - 18, top + 300, f"{attended_pairs([seq_len])} as in one document")
    return drawing.svg()


def tiles(lengths: Sequence[int], tile: Tile) -> str:
    """The tiles of one packed row. Tiles begin at the start of each document, and the mask gives each one's state."""
    drawing = Drawing(500, CAPTIONS["tiles.svg"])
    total = sum(lengths)
    left, top, scale = 30, 62, 410 / total
    drawing.text(left, 36, f"{len(lengths)} documents in a row of {total:,} tokens", bold=True)
    states = [Causal().blocks(Entry.of_lengths(n, n), tile.block_m, tile.block_n)[0].tolist() for n in lengths]
    counts = {SKIPPED: 0, WHOLE: 0, PARTIAL: 0}
    for document, i, begin, stop in _spans(lengths, tile.block_m):
        for other, j, first_key, last_key in _spans(lengths, tile.block_n):
            state = states[document][i][j] if other == document else SKIPPED  # of another document: not even listed
            counts[state] += 1
            size = (scale * (last_key - first_key) - 1.5, scale * (stop - begin) - 1.5)
            drawing.rect(left + scale * first_key, top + scale * begin, *size, TILE_COLORS[state])
    drawing.line([(left, top), (left + scale * total, top + scale * total)], INK, 2.5)
    x = left + 432
    for state, y, words, explanation in (
        (SKIPPED, 76, "skipped", "never loaded"), (WHOLE, 172, "full", "no mask to evaluate"),
        (PARTIAL, 268, "partial", "mask evaluated"),
    ):  # fmt: skip
        drawing.rect(x, y, 30, 30, TILE_COLORS[state], GREY if state == SKIPPED else "")
        drawing.text(x + 42, y + 24, f"{counts[state]} {words}", 24, bold=True)
        drawing.text(x, y + 58, explanation)
    y = top + 316
    for i, words in enumerate([f"tile: {tile.block_m} queries", f"by {tile.block_n} keys", "line: the query itself"]):
        drawing.text(x, y + 27 * i, words, fill=GREY)
    return drawing.svg()


def _spans(lengths: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """The tiles of a row along one side: document, number in the document, first token and end in the row."""
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        (i, at // size, begin + at, begin + min(at + size, length))
        for i, (begin, length) in enumerate(zip(begins, lengths, strict=True))
        for at in range(0, length, size)
    ]


def philox_tile() -> tuple[list[list[int]], list[list[int]]]:
    """For each element of a 16 x 16 tile: the number of its Philox call, and the byte of the call that it reads.

    `keep_mask` answers: a stand-in for Philox records the counters and returns known bytes.
    """
    counters: list[tuple[Tensor, ...]] = []

    def known_bytes(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        counters.append(counter)
        outputs = [sum((4 * number + byte) << 8 * byte for byte in range(4)) for number in range(4)]
        return tuple(torch.full_like(counter[0], output) for output in outputs)

    positions, state = torch.arange(16), torch.zeros(2, dtype=torch.int64)
    with mock.patch.object(dropout_map, "philox", known_bytes):
        kept = [dropout_map.keep_mask(state, 0, 0, positions, positions, threshold) for threshold in range(1, 17)]
    number = 16 - torch.stack(kept).sum(0)  # byte b of a call is below the thresholds b + 1 to 16
    calls = torch.stack(counters[-1], -1).reshape(-1, 4).unique(dim=0, return_inverse=True)[1].reshape(16, 16)
    return calls.tolist(), number.tolist()


def dropout(row: int, column: int) -> str:
    """The Philox calls of a 16 x 16 tile, with one call's elements and their bytes marked."""
    drawing = Drawing(560, CAPTIONS["dropout.svg"])
    calls, numbers = philox_tile()
    own = calls[row][column]
    members = [(i, j) for i in range(16) for j in range(16) if calls[i][j] == own]
    rows, columns = sorted({i for i, _ in members}), sorted({j for _, j in members})
    left, top, side = 62, 66, 29
    drawing.text(left + 8 * side, 28, "keys", 20, "middle", bold=True)
    drawing.text(24, top + 8 * side, "queries", 20, "middle", bold=True, upwards=True)
    hues = {call: i for i, call in enumerate(sorted({call for line in calls for call in line}))}
    for i, line in enumerate(calls):
        for j, call in enumerate(line):
            x, y = left + side * j, top + side * i
            hue, light = 90 * (hues[call] % 4) + 20 * (hues[call] // 4 % 2), 80 + 4 * (hues[call] // 4)
            drawing.rect(x, y, side - 1.5, side - 1.5, BLUE if call == own else f"hsl({hue}, 45%, {light}%)")
            if call == own:
                drawing.text(x + side / 2 - 1, y + 21, str(numbers[i][j]), 19, "middle", "#FFFFFF", True)
    for j in columns:
        drawing.text(left + side * j + side / 2, top - 10, str(j), 20, "middle", BLUE, True)
    for i in rows:
        drawing.text(left - 8, top + side * i + 21, str(i), 20, "end", BLUE, True)
    x = left + 16 * side + 18
    drawing.text(x, 100, f"{len(hues)} calls", 24, bold=True)
    drawing.text(x, 128, "for one tile")
    drawing.text(x, 190, "one call", 24, fill=BLUE, bold=True)
    shown = [f"{len(members)} elements", f"{len({numbers[i][j] for i, j in members})} bytes", "number = byte"]
    for y, words in zip((218, 245, 272), shown, strict=True):
        drawing.text(x, y, words)
    for y, words, places in ((326, "rows", rows), (390, "columns", columns)):
        drawing.text(x, y, words)
        drawing.text(x, y + 27, ", ".join(map(str, places)))
    return drawing.svg()


def memory(step: Step, name: str) -> str:
    """The predicted memory over the moments of a step, stacked by kind."""
    drawing = Drawing(460, CAPTIONS["memory.svg"])
    prediction = predict(step)
    peak = prediction.peak_bytes
    columns: dict[tuple[str, int], Moment] = {}  # the fullest moment of each stretch within a phase
    for i, (phase, moment) in enumerate(prediction.moments):
        place = (phase, i * 256 // len(prediction.moments))
        columns[place] = max(columns.get(place, moment), moment, key=lambda found: found.total)
    kinds = [kind for kind in ORDER if any(moment.parts.get(kind, 0) > 0.02 * peak for moment in columns.values())]
    left, bottom, width, height = 62, 408, 384, 316
    places = [left + width * i / (len(columns) - 1) for i in range(len(columns))]
    for i in range(len(kinds), 0, -1):  # from the top down; each area covers the lower part of the one before
        sizes = [sum(moment.parts.get(kind, 0) for kind in kinds[:i]) for moment in columns.values()]
        upper = [(x, bottom - height * size / peak) for x, size in zip(places, sizes, strict=True)]
        drawing.area([(left, bottom), *upper, (left + width, bottom)], COLORS[kinds[i - 1]])
    drawing.text(20, 34, f"{name}, {step.seq_len:,} tokens, {step.precision}, memory={step.memory}", bold=True)
    drawing.line([(left, bottom - height), (left, bottom), (left + width, bottom)])
    tick = 5 if peak < 40 * GIB else 20
    for gib in range(0, int(peak / GIB) + 1, tick):
        drawing.text(left - 8, bottom - gib * GIB / peak * height + 7, str(gib), 20, "end")
    drawing.text(left - 42, bottom - height - 16, "GiB")
    for phase, words in PHASE_NAMES.items():
        own = [x for x, (of, _) in zip(places, columns, strict=True) if of == phase]
        if len(own) > 0.2 * len(places):  # a narrow phase has no room for its name
            drawing.text(sum(own) / len(own), bottom + 30, words, 20, "middle")
            drawing.line([(own[-1], bottom - height), (own[-1], bottom)], INK, 1.5, "3 4")
    drawing.text(left + width + 2, bottom - height - 16, f"peak {peak / GIB:.1f} GiB", 20, "end", bold=True)
    for i, kind in enumerate(reversed(kinds)):
        drawing.rect(left + width + 26, bottom - height + 4 + 36 * i, 22, 22, COLORS[kind])
        drawing.text(left + width + 56, bottom - height + 22 + 36 * i, kind)
    return drawing.svg()


def row_split(lengths: Sequence[int], ranks: int) -> str:
    """One packed row, the pieces that each device holds, and its attended pairs."""
    seq_len = sum(lengths)
    plan = plan_row(lengths, seq_len, ranks)
    begins = plan.begins
    drawing = Drawing(308 + 52 * ranks, CAPTIONS["row_split.svg"])
    left, scale = 20, 660 / seq_len
    drawing.text(left, 36, f"one row: {seq_len:,} tokens, {len(lengths)} documents", bold=True)
    for document, length in enumerate(lengths):
        x = left + scale * (begins[document] + length / 2)
        drawing.text(x, 70, LETTERS[document], 20, "middle")
    for rank in range(ranks):
        for piece in plan.pieces[rank]:
            x = left + scale * (begins[piece.document] + piece.start)
            drawing.box(x, 80, scale * len(piece), 46, PALETTE[rank], str(rank))
    for begin in begins[1:-1]:
        drawing.line([(left + scale * begin, 56), (left + scale * begin, 132)], INK, 2.5)

    top, wide = 206, 366
    drawing.text(left, top - 18, f"{ranks} devices, {plan.seq_len // ranks:,} tokens each", bold=True)
    drawing.text(left + 414, top - 18, "attended pairs", bold=True)
    most = max(plan.pairs)
    for rank in range(ranks):
        y, x = top + 52 * rank, left + 30.0
        drawing.text(left, y + 28, str(rank), 22, bold=True)
        for piece in plan.pieces[rank]:
            width = wide * len(piece) * ranks / seq_len
            drawing.box(x, y, width, 40, PALETTE[rank], LETTERS[piece.document])
            x += width
        words = f"{plan.pairs[rank] / 1e6:.1f} million"
        drawing.box(left + 414, y, 246 * plan.pairs[rank] / most, 40, PALETTE[rank], words, 20)
    y = top + 52 * ranks + 34
    drawing.text(left, y, "largest number of pairs / mean", bold=True)
    drawing.text(left, y + 30, f"this plan: {plan.imbalance:.2f}")
    drawing.text(left + 220, y + 30, f"{ranks} equal stretches of the row: {stretches_imbalance(lengths, ranks):.2f}")
    return drawing.svg()


def stretches_imbalance(lengths: Sequence[int], ranks: int) -> float:
    """The largest number of pairs over the mean if device r holds the r-th stretch of the row."""
    size, pairs = sum(lengths) // ranks, [0] * ranks
    for document, length in enumerate(lengths):
        begin = sum(lengths[:document])
        for rank in range(ranks):
            start, stop = max(0, rank * size - begin), min(length, (rank + 1) * size - begin)
            pairs[rank] += count_pairs(Piece(document, start, stop)) if start < stop else 0
    return max(pairs) * ranks / sum(pairs)


LOAD, PRODUCT, WEIGHTS = 1.0, 1.0, 3.0  # units of time in `schedule`: a load, a product, the exponentials of a block


Lanes = dict[str, list[tuple[float, float, str]]]  #: by lane: begin, end and name of each piece of work


def simulate(tile: ForwardTile, blocks: int) -> Lanes:
    """Run the steps of `hopper_forward` for one work tile: loads wait for released stages, consumers take turns."""
    stages = {"K": tile.k_stages, "V": tile.v_stages}
    lanes: Lanes = {"TMA loads": [], **{f"{kind} stage {i}": [] for kind in stages for i in range(stages[kind])}}
    loads: dict[str, float] = {}  # when each load begins
    released: dict[str, float] = {}
    producer = unit = 0.0  # when the producer and the matrix unit are free
    ready = [0.0] * tile.consumers

    def work(lane: str, begin: float, time: float, name: str) -> float:
        lanes.setdefault(lane, []).append((begin, begin + time, name))
        return begin + time

    def release(kind: str, block: int, at: float) -> None:
        name = f"{kind}{block}"
        released[name] = work(f"{kind} stage {block % stages[kind]}", loads[name], at - loads[name], name)

    for j in range(blocks + 1):
        for kind in stages if j < blocks else ():
            name = f"{kind}{j}"
            loads[name] = max(producer, released.get(f"{kind}{j - stages[kind]}", 0.0))
            producer = work("TMA loads", loads[name], LOAD, name)
        for w in range(tile.consumers):
            needed = [loads[name] + LOAD for name in (f"K{j}", f"V{j - 1}") if name in loads]
            unit = max(ready[w], unit, *needed)
            if j < blocks:
                unit = work(f"consumer {w}", unit, PRODUCT, f"S{j}")
                ready[w] = work(f"consumer {w}, exp", unit, WEIGHTS, f"P{j}")
            scored = unit
            if j > 0:
                unit = work(f"consumer {w}", unit, PRODUCT, f"O{j - 1}")
                ready[w] = max(ready[w], unit) if j < blocks else unit
        if j < blocks:  # a later block may compute its logits once more
            release("K", j, max(ready) if j else scored)
        if j > 0:
            release("V", j - 1, max(ready))
    return lanes


def schedule(tile: ForwardTile, blocks: int) -> str:
    """The warps of the forward kernel for Hopper over time, and which block each stage of shared memory holds."""
    lanes = simulate(tile, blocks)
    of_memory = [lane for lane in lanes if not lane.startswith("consumer")]
    drawing = Drawing(162 + 38 * len(of_memory) + 84 * tile.consumers, CAPTIONS["schedule.svg"])
    left, scale = 158, 526 / max(end for pieces in lanes.values() for _, end, _ in pieces)
    queries = tile.as_tile.block_m // tile.consumers
    drawing.text(20, 36, f"{tile.consumers} consumers of {queries} queries, blocks of {tile.block_n} keys", bold=True)

    def show(lane: str, y: float, words: str, **style: Any) -> None:
        drawing.text(20, y + 24, words, **style)
        for begin, end, name in lanes[lane]:
            fill = PALETTE[int(name[1:]) % len(PALETTE)]
            drawing.box(left + scale * begin, y, scale * (end - begin), 34, fill, name, 17)

    for i, lane in enumerate(of_memory):
        show(lane, 56 + 38 * i + 12 * (i > 0), lane, bold=i == 0)
    y = 68 + 38 * len(of_memory)
    for w in range(tile.consumers):
        show(f"consumer {w}", y + 12, f"consumer {w}", bold=True)
        show(f"consumer {w}, exp", y + 48, "exponentials", fill=GREY)
        y += 84
    for x, words in ((20, "S = Q Kᵀ"), (158, "P = weights"), (314, "O += P V"), (450, "number: the block")):
        drawing.text(x, y + 34, words)
    drawing.text(20, y + 62, "The order is the kernel's; the durations are not measured.", fill=GREY)
    return drawing.svg()


if __name__ == "__main__":
    for file_name, svg in pictures().items():
        Path(sys.argv[1], file_name).write_text(svg, encoding="utf-8")
