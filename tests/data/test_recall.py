"""Associative recall: answers are correct, rows are pure functions, and a small transformer learns the task."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flash_train.data import IGNORE_INDEX, RecallCorpus, recall_accuracy
from flash_train.data.dataset import PADDING_ROW, collate
from flash_train.data.recall import RecallRows


def episodes(row: dict) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each entry of a row."""
    ends = np.cumsum(row["lengths"])
    spans = zip(ends - row["lengths"], ends, strict=True)
    return [(row["tokens"][begin:end].tolist(), row["labels"][begin:end].tolist()) for begin, end in spans]


@pytest.mark.parametrize("stream", ["train", "val"])
@pytest.mark.parametrize("seq_len", [100, 256, 4096])
def test_labels_are_the_values_stated_for_the_keys(stream, seq_len):
    rows = RecallRows(RecallCorpus(), seq_len, seed=0, stream=stream)
    lengths = set()
    for row in (rows[i] for i in range(60)):
        assert row["tokens"].shape == (seq_len,) and sum(row["lengths"]) == seq_len
        lengths.add(row["lengths"][0])
        for tokens, labels in episodes(row):
            stated = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))
            answers = dict(zip(tokens[0:stated:2], tokens[1:stated:2], strict=True))
            assert len(answers) == stated / 2 or stated == len(labels)  # keys are distinct; a tail has no labels
            assert [answers[key] for key in tokens[stated:]] == labels[stated:]
            assert all(0 <= key < 64 for key in answers) and all(64 <= value < 128 for value in labels[stated:])
    expected = {100: {16, 32, 64, 100}, 256: {16, 32, 64, 128, 256}, 4096: {2**i for i in range(4, 13)}}
    assert lengths == (expected[seq_len] if stream == "train" else {seq_len})


def test_a_validation_row_asks_about_all_pairs_to_its_end():
    row = RecallRows(RecallCorpus(n_pairs=20), 256, seed=0, stream="val")[0]
    assert (row["labels"][:40] == IGNORE_INDEX).all() and (row["labels"][40:] != IGNORE_INDEX).all()
    assert set(row["tokens"][40:].tolist()) <= set(row["tokens"][:40:2].tolist())


def test_rows_depend_on_their_number_only_and_streams_differ():
    def row(seed: int, stream: str, i: int) -> list[int]:
        return RecallRows(RecallCorpus(), 256, seed, stream)[i]["tokens"].tolist()

    assert row(1, "train", 5) == row(1, "train", 5)
    distinct = [(1, "train", 5), (2, "train", 5), (1, "train", 6), (1, "val", 5), (1, "train", 2**40)]
    assert len({tuple(row(*which)) for which in distinct}) == len(distinct)


def test_capacity_holds_any_row_and_a_padding_row_has_no_labels():
    rows = RecallRows(RecallCorpus(), 250, seed=0, stream="train")
    assert max(len(rows[i]["lengths"]) for i in range(40)) == 16 == rows.capacity
    assert collate([rows[0], rows[PADDING_ROW]])["cu_seqlens"].shape == (33,)
    assert (rows[PADDING_ROW]["labels"] == IGNORE_INDEX).all()


def test_accuracy_counts_answers_only():
    labels = torch.tensor([[IGNORE_INDEX, 1, 2, 3]])
    logits = F.one_hot(torch.tensor([[0, 1, 2, 0]]), 4).float()
    assert recall_accuracy(logits, labels) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no position has a label"):
        recall_accuracy(logits, torch.full((1, 4), IGNORE_INDEX))


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="data.n_pairs=65: must be from 1 to n_keys=64"):
        RecallCorpus(n_pairs=65)
    with pytest.raises(ValueError, match="data.n_keys=200, n_values=64: must be 256 or less together"):
        RecallCorpus(n_keys=200, n_values=64)
    with pytest.raises(ValueError, match="data.n_pairs=2.5: must be an integer of at least 1"):
        RecallCorpus(n_pairs=2.5)
    with pytest.raises(ValueError, match="data.n_keys='64': must be an integer of at least 1"):
        RecallCorpus(n_keys="64")
    with pytest.raises(ValueError, match="seq_len=64: must be greater than 2 \\* n_pairs = 64 with data=recall"):
        RecallRows(RecallCorpus(), 64, seed=0, stream="train")


class Block(nn.Module):
    """Pre-norm attention (relative positions by a learned bias) and MLP."""

    def __init__(self, width: int, seq_len: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm, self.mlp_norm = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.bias = nn.Parameter(torch.zeros(heads, seq_len))

    def forward(self, x: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.bias[:, distance].masked_fill(~mask, -torch.inf)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


@pytest.mark.slow
def test_a_small_transformer_learns_it_and_guesses_without_the_pairs():
    torch.manual_seed(0)
    corpus, seq_len, width = RecallCorpus(n_pairs=8, n_keys=16, n_values=16), 64, 64
    train, val = (RecallRows(corpus, seq_len, 0, stream) for stream in ("train", "val"))
    embedding, head = nn.Embedding(32, width), nn.Linear(width, 32)
    blocks = nn.ModuleList(Block(width, seq_len) for _ in range(2))
    distance = (torch.arange(seq_len)[:, None] - torch.arange(seq_len)).clamp(min=0)

    def logits(batch: dict) -> torch.Tensor:
        entry = (batch["positions"] == 0).cumsum(1)
        mask = (entry[:, :, None] == entry[:, None]) & torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        x = embedding(batch["tokens"])
        for block in blocks:
            x = block(x, distance, mask[:, None])
        return head(x)

    parameters = [*embedding.parameters(), *blocks.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    batch = collate([val[i] for i in range(64)])
    for i in range(400):
        seen = collate([train[i * 32 + j] for j in range(32)])
        loss = F.cross_entropy(logits(seen).flatten(0, 1), seen["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if i % 25 == 0 and recall_accuracy(logits(batch).detach(), batch["labels"]) > 0.95:
            break
    blind = {**batch, "tokens": torch.where(batch["labels"] == IGNORE_INDEX, 0, batch["tokens"])}
    with torch.no_grad():
        assert recall_accuracy(logits(batch), batch["labels"]) > 0.95
        assert recall_accuracy(logits(blind), batch["labels"]) < 3 * corpus.chance
