"""A checkpoint as a folder that `transformers` and `init_from` read."""

import json
import re
import subprocess
import sys

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from flash_train.cli import export as export_command
from flash_train.cli import train as command
from flash_train.model import ModelConfig, Transformer, save_pretrained
from tests.support.data.tokenizers import write_tokenizer


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


@pytest.mark.slow
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

    # Training continues from the export, at twice the length.
    trained(f"init_from={tmp_path / 'llama'}", "model=pretrained", "seq_len=128", f"run_dir={tmp_path / 'longer'}")
    assert (tmp_path / "longer" / "summary.json").is_file()
    hint = r"made for rows of 64 tokens and these have 128; (model\.rope_scaling\.kind=yarn .*) would stretch it"
    stretched = [*re.search(hint, capsys.readouterr().out)[1].split(), f"run_dir={tmp_path / 'stretched'}"]
    trained(f"init_from={tmp_path / 'llama'}", "model=pretrained", "seq_len=128", *stretched)
    assert "made for rows" not in capsys.readouterr().out


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama as `transformers` saves it, with a tokenizer whose bos and eos are 256 and 257."""
    folder = tmp_path / "source"
    shape = ModelConfig(vocab_size=320, n_layers=1, width=16, n_heads=2, n_kv_heads=1, head_dim=8, mlp_width=32)
    save_pretrained(Transformer(shape, attention="sdpa"), shape, folder)
    write_tokenizer(folder / "tokenizer.json", ["<s>", "</s>"])
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def extended(llama, trained, tiny):
    """The directory of a run that trained this Llama for one step."""
    tiny[:] = [text for text in tiny if not text.startswith("model.")]
    return trained(f"init_from={llama}")


def ids_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")]


def test_a_llama_keeps_its_tokenizer(llama, extended, trained, tmp_path, capsys):
    export_command.main([str(extended), str(tmp_path / "out")])
    assert capsys.readouterr().err == ""
    assert ids_of(tmp_path / "out") == [256, 257, None]  # it has no pad token: rows are filled with eos
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)

    # The next run reads what was written.
    trained(f"init_from={tmp_path / 'out'}", f"run_dir={tmp_path / 'again'}")
    export_command.main([str(tmp_path / "again"), str(tmp_path / "twice")])
    assert ids_of(tmp_path / "twice") == [256, 257, None]
    assert (tmp_path / "twice" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("specials", "says"), [([], "is no longer there"), (["</s>"], "has changed since the run")])
def test_a_tokenizer_that_changed_since_is_not_written(extended, llama, tmp_path, capsys, specials, says):
    if specials:
        write_tokenizer(llama / "tokenizer.json", specials)
    else:
        (llama / "tokenizer.json").unlink()
    export_command.main([str(extended), str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"tokenizer.json was not written, as {llama / 'tokenizer.json'} {says}" in line
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert ids_of(tmp_path / "out") == [256, 257, None]


def test_a_checkpoint_without_token_ids(extended, tmp_path, capsys):
    path = extended / "checkpoints" / "step-000001.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["PackedDataModule"]["token_ids"], checkpoint["PackedDataModule"]["tokenizer_file"]
    torch.save(checkpoint, path)
    export_command.main([str(extended), str(tmp_path / "out")])
    (line,) = capsys.readouterr().err.splitlines()
    assert "the checkpoint names no file of its tokenizer" in line
    assert ids_of(tmp_path / "out") == [None, None, None]


def test_dtype(trained, tmp_path):
    export_command.main([str(trained()), str(tmp_path / "llama"), "--dtype", "bf16"])
    assert LlamaForCausalLM.from_pretrained(tmp_path / "llama").dtype == torch.bfloat16


def test_fp32_weights_have_all_bits_of_an_exact_master(trained, tmp_path):
    run_dir = trained("precision=bf16-true")
    export_command.main([str(run_dir), str(tmp_path / "bf16")])
    export_command.main([str(run_dir), str(tmp_path / "fp32"), "--dtype", "fp32"])
    rounded, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "fp32"))
    assert {weight.dtype for weight in exact.values()} == {torch.float32}
    for name, weight in exact.items():
        # a tie is rounded away from zero, and by PyTorch to even
        torch.testing.assert_close(weight.to(torch.bfloat16), rounded[name], rtol=2**-7, atol=0)
    assert any((weight != rounded[name].float()).any() for name, weight in exact.items())


def refused(capsys, *arguments) -> str:
    """The error message of an export, which has one line."""
    with pytest.raises(SystemExit) as stop:
        export_command.main(list(map(str, arguments)))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1
    return line.removeprefix("flash-train: ")


@pytest.mark.parametrize(
    ("name", "says"), [("none", "no such file or folder"), ("text.txt", "not a checkpoint"), (".", "no checkpoint")]
)
def test_mistakes(tmp_path, capsys, name, says):
    (tmp_path / "text.txt").write_text("hello")
    line = refused(capsys, tmp_path / name, tmp_path / "llama")
    assert line.startswith(f"checkpoint={tmp_path / name}: ") and says in line
    assert not (tmp_path / "llama").exists()


def test_the_folder_that_a_run_read_is_never_replaced(llama, extended, capsys):
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    line = refused(capsys, extended, llama, "--force")
    assert line == f"folder={llama}: the run read its tokenizer or model there; allowed: another folder"
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_model_is_replaced_only_with_force(trained, tmp_path, capsys, name):
    run_dir, target = trained(), tmp_path / "llama"
    target.mkdir()
    (target / name).write_text("theirs")
    capsys.readouterr()
    line = refused(capsys, run_dir, target)
    assert line == f"folder={target}: holds a model ({name}); allowed: another folder, or --force to replace it"
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [(name, "theirs")]
    export_command.main([str(run_dir), str(target), "--force"])
    assert LlamaForCausalLM.from_pretrained(target)
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # safetensors makes private files


def test_a_target_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert refused(capsys, tmp_path, tmp_path / "file").startswith(f"folder={tmp_path / 'file'}: ")


def test_a_target_that_cannot_be_written(trained, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    run_dir = trained()
    capsys.readouterr()
    monkeypatch.setattr("flash_train.model.save_pretrained", full)
    assert refused(capsys, run_dir, tmp_path / "out").startswith(f"folder={tmp_path / 'out'}: ")


def test_arguments_are_parsed_before_pytorch_is_imported(capsys):
    assert "required: checkpoint, folder" in refused(capsys)
    assert "--dtype" in refused(capsys, "a", "b", "--dtype", "fp8")
    code = "import sys; from flash_train.cli import export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Other(LightningModule):
    """A foreign module, whose hyper-parameters may have the same names as ours."""

    def __init__(self, **hyper_parameters):
        super().__init__()
        self.save_hyperparameters(hyper_parameters)


@pytest.mark.parametrize("hyper_parameters", [{}, {"model": "resnet18"}])
def test_the_checkpoint_of_another_module(tmp_path, capsys, hyper_parameters):
    trainer = Trainer(accelerator="cpu", logger=False, enable_model_summary=False)
    trainer.strategy.connect(Other(**hyper_parameters))
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        export_command.main([str(tmp_path / "other.ckpt"), str(tmp_path / "llama")])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and "other.ckpt does not describe its model" in line
    assert not (tmp_path / "llama").exists()


def test_an_empty_folder_is_a_mistake(trained, capsys):
    line = refused(capsys, trained(), "")
    assert (
        line
        == "argument folder: is empty; allowed: the name of a folder, or . for this one; --help lists what is allowed"
    )
