"""The pictures of the site are valid, are the same each time, and show what the project's own functions compute."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from flash_train.attention.dropout import keep_mask, philox, stream_key
from flash_train.attention.flops import attended_pairs
from flash_train.attention.masks import Causal
from flash_train.attention.packing import Entry
from flash_train.attention.parallel.row_plan import plan_row
from flash_train.data.packing import pack
from flash_train.model import ModelConfig
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step
from flash_train.records.memory_use import GIB
from tests.support.scripts import load_script

TABLES = pytest.importorskip("flash_train.attention.kernels.hopper.tiles", reason="Triton exists for Linux only")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def site_pictures():
    return load_script("site_pictures")


@pytest.fixture(scope="module")
def drawn(site_pictures):
    return site_pictures.pictures()


def words_of(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def fills_of(svg: str) -> list[str]:
    return [rect.get("fill") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


def test_each_picture_is_valid_legible_and_within_its_card(site_pictures, drawn):
    assert set(drawn) == set(site_pictures.CAPTIONS)
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(int, root.get("viewBox").split())
        assert root.find(f"{SVG}title").text == site_pictures.CAPTIONS[name]
        assert "NaN" not in svg and "nan" not in svg
        for text in root.iter(f"{SVG}text"):
            size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
            assert size >= 17  # half of it on a telephone
            extent = 0.5 * size * len(text.text)
            before = {"start": 0, "middle": extent / 2, "end": extent}[text.get("text-anchor")]
            if text.get("transform") is None:
                assert x - before >= 0 and x - before + extent <= width, text.text
            assert size <= y <= height - 10, text.text
        for rect in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
            assert min(x, y) >= 0 and min(w, h) > 0 and x + w <= width and y + h <= height


def test_drawing_twice_gives_the_same_text(site_pictures, drawn):
    assert site_pictures.pictures() == drawn


@pytest.mark.parametrize(("lengths", "seq_len"), [((21, 9, 6, 7, 5), 16), ((5, 13, 4), 10)])
def test_packing_shows_the_rows_of_pack(site_pictures, lengths, seq_len):
    svg = site_pictures.packing(lengths, seq_len)
    index = pack(np.array(lengths), seq_len)
    rows = [index.row(row) for row in range(len(index))]
    labels = words_of(svg)
    assert f"{len(rows)} rows of {seq_len} tokens" in labels
    assert [word for word in labels if ":" in word] == [f"{'ABCDE'[d]}: {n}" for row in rows for d, _, n in row]
    entries = [length for _, _, length in rows[-1]]
    if sum(entries) < seq_len:
        entries.append(seq_len - sum(entries))
    hidden = seq_len**2 - attended_pairs(entries)
    assert f"{attended_pairs(entries)} pairs attend, not" in labels
    assert f"{attended_pairs([seq_len])} as in one document" in labels
    assert fills_of(svg).count(site_pictures.PALE) == hidden


@pytest.mark.parametrize("tile", [TABLES.FORWARD[128].as_tile, TABLES.Tile(64, 128, 4, 2)])
def test_tiles_are_counted_pair_by_pair(site_pictures, tile):
    lengths, counts = (500, 384, 140), {"skipped": 0, "full": 0, "partial": 0}
    for document, length in enumerate(lengths):
        for other, keys in enumerate(lengths):
            dense = Causal().dense(Entry.of_lengths(length, keys))[0] & (document == other)
            for rows in dense.split(tile.block_m):
                for block in rows.split(tile.block_n, 1):
                    counts["full" if block.all() else "partial" if block.any() else "skipped"] += 1
    svg = site_pictures.tiles(lengths, tile)
    shown = {word: int(n) for n, word in re.findall(r">(\d+) (skipped|full|partial)<", svg)}
    # a kernel masks a block of keys that the document does not fill, even if all pairs in it attend
    assert shown["skipped"] == counts["skipped"] and sum(shown.values()) == sum(counts.values())
    assert counts["partial"] <= shown["partial"] <= counts["partial"] + len(lengths)
    names = {site_pictures.PALE: "skipped", site_pictures.BLUE: "full", site_pictures.ORANGE: "partial"}
    fills = fills_of(svg)
    assert {name: fills.count(fill) - 1 for fill, name in names.items()} == shown  # one is in the legend


def test_the_dropout_map_is_the_map_of_keep_mask(site_pictures):
    """The bytes that the calls draw, in the places of the picture, are below exactly the thresholds of `keep_mask`."""
    calls, numbers = site_pictures.philox_tile()
    at = torch.arange(16)
    state = torch.tensor([3, 5])
    counters = [torch.tensor([n // 4 for n in range(16)]), torch.tensor([n % 4 for n in range(16)])]
    rest = torch.zeros(16, dtype=torch.int64)
    labels = torch.stack(philox((*counters, rest, rest), stream_key(state)), 1)
    drawn = (labels[:, :, None] >> torch.arange(0, 32, 8) & 0xFF).reshape(16, 16)  # of each call: its 16 bytes
    found = drawn[torch.tensor(calls), torch.tensor(numbers)]
    for threshold in (1, 64, 200, 256):
        assert torch.equal(found < threshold, keep_mask(state, 0, 0, at, at, threshold))
    assert sorted(zip(sum(calls, []), sum(numbers, []), strict=True)) == [(c, n) for c in range(16) for n in range(16)]
    labels = words_of(site_pictures.dropout(5, 14))
    assert "4, 5, 12, 13" in labels and "6, 7, 14, 15" in labels and "16 calls" in labels and "16 elements" in labels


def test_memory_shows_the_prediction(site_pictures, drawn):
    model = ModelConfig(
        vocab_size=4096, n_layers=4, width=1024, n_heads=8, n_kv_heads=8, head_dim=128, mlp_width=2816,
        tied_embeddings=False,
    )  # fmt: skip
    for step in (Step(model, 65536), Step(model, 8192, memory="checkpoint")):
        prediction = predict(step)
        labels = words_of(site_pictures.memory(step, "small"))
        assert f"small, {step.seq_len:,} tokens, bf16-mixed, memory={step.memory}" in labels
        assert f"peak {prediction.peak_bytes / GIB:.1f} GiB" in labels
        held = {kind for _, moment in prediction.moments for kind in moment.parts}
        assert {"weights", "attention", "gradients"} <= set(labels) & held
    assert "1b3, 16,384 tokens, bf16-true, memory=selective" in words_of(drawn["memory.svg"])


def test_row_split_shows_the_plan(site_pictures):
    lengths, ranks = (3000, 500, 700, 396, 1548), 3
    plan = plan_row(lengths, sum(lengths), ranks)
    labels = words_of(site_pictures.row_split(lengths, ranks))
    assert f"{ranks} devices, {sum(lengths) // ranks:,} tokens each" in labels
    assert [word for word in labels if "million" in word] == [f"{pairs / 1e6:.1f} million" for pairs in plan.pairs]
    assert f"this plan: {plan.imbalance:.2f}" in labels
    # two documents of a stretch each: the causal pairs of the stretches are equal
    assert site_pictures.stretches_imbalance((4096, 4096), 2) == 1
    # of one document, the second half has three times as many pairs as the first
    assert site_pictures.stretches_imbalance((8192,), 2) == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("tile", [*TABLES.FORWARD.values(), TABLES.LONG, TABLES.ForwardTile(2, 32, 1, 5, 2)])
def test_the_schedule_obeys_the_pipeline(site_pictures, tile):
    blocks = 6
    lanes = site_pictures.simulate(tile, blocks)
    work = {(lane, name): (begin, end) for lane, pieces in lanes.items() for begin, end, name in pieces}
    for pieces in lanes.values():
        assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(pieces))
    products = sorted(p for w in range(tile.consumers) for p in lanes[f"consumer {w}"])
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(products))  # there is one matrix unit
    for j in range(blocks):
        for kind, stages, product in (("K", tile.k_stages, "S"), ("V", tile.v_stages, "O")):
            held = work[f"{kind} stage {j % stages}", f"{kind}{j}"]
            loaded = work["TMA loads", f"{kind}{j}"]
            assert held[0] == loaded[0]
            for w in range(tile.consumers):
                used = work[f"consumer {w}", f"{product}{j}"]
                assert loaded[1] <= used[0] and used[1] <= held[1]
                assert work[f"consumer {w}", f"S{j}"][1] <= work[f"consumer {w}, exp", f"P{j}"][0]
                assert work[f"consumer {w}, exp", f"P{j}"][1] <= work[f"consumer {w}", f"O{j}"][0]
    labels = words_of(site_pictures.schedule(tile, 4))
    assert sum("stage" in word for word in labels) == tile.k_stages + tile.v_stages
    assert f"{tile.consumers} consumers of 64 queries, blocks of {tile.block_n} keys" in labels


def test_the_resumed_run_has_the_rows_and_seeds_of_the_whole_one(drawn):
    words = words_of(drawn["resume.svg"])
    whole, stopped = words.index("whole run"), words.index("stopped")
    lanes = [words[begin + 1 : begin + 1 + 6 * 3] for begin in (whole, stopped)]
    assert lanes[0] == lanes[1]
    numbers = [int(word) for i, word in enumerate(lanes[0]) if i % 3 < 2]
    assert [sorted(numbers[i : i + 5]) for i in (0, 5)] == [[0, 1, 2, 3, 4]] * 2  # each epoch has every row once


def test_the_flops_for_mfu_are_those_of_the_documents(drawn):
    labels = words_of(drawn["mfu.svg"])
    lengths = [int(label.partition(": ")[2].replace(",", "")) for label in labels if re.match("[A-D]: ", label)]
    documents, whole = (int(label.removesuffix(" TFLOP")) for label in labels if label.endswith(" TFLOP"))
    pair = 12 * 24 * 16 * 128 / 1e12  # of 1b3
    difference = pair * (attended_pairs([sum(lengths)]) - attended_pairs(lengths))
    assert sum(lengths) == 16384 and abs(whole - documents - difference) <= 1
