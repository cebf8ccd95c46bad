"""A damaged file of a saved model gives a one-line error that names the file and the likely cause."""

import json
from pathlib import Path

import pytest

from flash_train.model import ModelConfig, Transformer, load_pretrained, save_pretrained

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = ModelConfig(vocab_size=32, n_layers=1, width=8, n_heads=1, n_kv_heads=1, head_dim=8, mlp_width=8)
    return save_pretrained(Transformer(config, attention="sdpa"), config, tmp_path / "llama")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content[:-40], "is damaged or cut off, with"),
        (lambda content: content[:20], "is damaged or cut off, with 20 bytes"),
        (lambda content: b"", "is damaged or cut off, with 0 bytes"),
        (lambda content: LFS, "is a Git LFS pointer, not the file itself; `git lfs pull`"),
        (lambda content: b"<html>Not Found</html>", "is damaged or cut off"),
    ],
    ids=["truncated", "header", "empty", "lfs", "html"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_named(llama, name, change, says):
    file = llama / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=says) as caught:
        load_pretrained(llama)
    assert str(caught.value).startswith(f"init_from={llama}: {name} ")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 3}}, {"weight_map": {}}])
def test_index_without_a_weight_map_is_refused(llama, index):
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="has no weight_map"):
        load_pretrained(llama)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_not_an_object_is_refused(llama, name):
    (llama / "model.safetensors").unlink()
    (llama / name).write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} holds list"):
        load_pretrained(llama)
