"""A checkpoint as a folder that `transformers` and `init_from` read."""

import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from transformers import LlamaForCausalLM

from flash_train.cli import export as export_command
from flash_train.cli import train as command
from flash_train.model import ModelConfig, Transformer


@pytest.fixture
def trained(tiny, tmp_path, monkeypatch):
    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["flash-train", *tiny, "max_steps=1", *arguments])
        try:
            command.main()
        finally:
            GlobalHydra.instance().clear()
        return tmp_path / "run"

    return run


def test_round_trip(trained, tmp_path, capsys):
    run_dir = trained()
    export_command.main([str(run_dir), str(tmp_path / "llama")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "llama")

    checkpoint = torch.load(run_dir / "checkpoints" / "step-000001.ckpt", weights_only=True)
    ours = Transformer(ModelConfig.from_dict(checkpoint["hyper_parameters"]["model"]), attention="sdpa").eval()
    ours.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32).eval()
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    assert theirs.config.max_position_embeddings == 64
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (256, 257)

    # And on from there, at twice the length.
    trained(f"init_from={tmp_path / 'llama'}", "model=pretrained", "seq_len=128", f"run_dir={tmp_path / 'longer'}")
    assert (tmp_path / "longer" / "summary.json").is_file()


def test_dtype(trained, tmp_path):
    export_command.main([str(trained()), str(tmp_path / "llama"), "--dtype", "bf16"])
    assert LlamaForCausalLM.from_pretrained(tmp_path / "llama").dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "says"), [("none", "none"), ("text.txt", "not a checkpoint"), (".", "no checkpoint")])
def test_mistakes(tmp_path, capsys, name, says):
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(SystemExit) as stop:
        export_command.main([str(tmp_path / name), str(tmp_path / "llama")])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and says in line
    assert not (tmp_path / "llama").exists()
