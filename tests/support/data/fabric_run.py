"""Two ranks of Fabric train and validate a model for a few steps; each saves the batches that it got."""

import sys
from itertools import islice
from pathlib import Path

import torch
from lightning import Fabric

from flash_train.data import ByteTokenizer, PackedDataModule
from flash_train.model import ModelConfig, Transformer
from tests.support.data.corpora import ListCorpus, random_texts


def main(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    corpus = ListCorpus(random_texts(200, 150))
    options = {"seq_len": 64, "batch_size": 2, "seed": 7, "val_fraction": 0.2, "cache_dir": folder}
    data = PackedDataModule(corpus, ByteTokenizer(), **options)
    train, val = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=data.vocab_size, n_layers=1, width=16, n_heads=2, n_kv_heads=1, head_dim=8, mlp_width=32
    )
    model = Transformer(config, attention="sdpa")
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.mark_forward_method("loss")
    seen = {"train": [], "val": [batch["tokens"] for batch in val]}
    for batch in islice(train, 6):
        total, count = model.loss(batch["tokens"], batch["labels"])
        fabric.backward(total / count)
        optimizer.step()
        optimizer.zero_grad()
        seen["train"].append(batch["tokens"])
    seen |= {"consumed": data.state_dict()["consumed_batches"], "loss": total.detach()}
    seen["weight"] = model.module.embedding.weight.detach()
    torch.save(seen, folder / f"rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
