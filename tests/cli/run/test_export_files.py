"""An export keeps the files of the model that training began from, except for what training changed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flash_train.cli import export as export_command
from flash_train.cli import train as command
from tests.support.data.tokenizers import write_tokenizer
from tests.support.tiers import slow_after

SPECIALS = ["<s>", "</s>", "<|endoftext|>", "<|im_end|>"]  # ids 256 to 259
STILL = "optimizer.lr=1e-30"  # a step leaves all weights as they are


@pytest.fixture
def source(tmp_path):
    """A small Llama with all files that transformers writes, and some that people add."""
    folder = tmp_path / "source"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=[258, 259],
        attention_dropout=0.1,
        rope_parameters={
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        },
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, eos_token_id=[258, 259], bos_token_id=256
    )
    model.save_pretrained(folder, max_shard_size="10KB")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(write_tokenizer(tmp_path / "tokens.json", SPECIALS)),
        bos_token="<s>",
        eos_token="<|endoftext|>",
        chat_template={"default": "{{ messages }}", "tools": "{{ tools }}"},
    )
    tokenizer.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "<|endoftext|>"}}')
    (folder / "tokenizer.model").write_bytes(b"\x00\xff a model of sentencepiece")
    (folder / "README.md").write_text("A model card: ä.\r\n", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"weights in another format")
    (folder / ".gitattributes").write_text("*.bin filter=lfs")
    assert (folder / "additional_chat_templates" / "tools.jinja").is_file()
    return folder


@pytest.fixture
def trained(tiny, corpus, tmp_path, in_this_process):
    """A function that trains from a folder with these arguments and returns the run's directory."""
    run = in_this_process(command.main)
    shared = [text for text in tiny if not text.startswith(("model.", "run_dir=", "data.path="))]

    def train(folder, *arguments, name="run"):
        run_dir = tmp_path / name
        text = [] if "data=recall" in arguments else [f"data.path={corpus}"]
        code, lines = run(*shared, *text, f"init_from={folder}", f"run_dir={run_dir}", "max_steps=1", STILL, *arguments)
        assert code == 0, lines
        return run_dir

    return train


def exported(run_dir, folder, *arguments):
    export_command.main([str(run_dir), str(folder), *arguments])
    return folder


def files_of(folder):
    """The content of every file except weights and hidden files."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    is_weights = {".safetensors", ".bin"}
    kept = [file for file in files if file.suffix not in is_weights and file.name[0] != "."]
    return {str(file.relative_to(folder)): file.read_bytes() for file in kept if ".index." not in file.name}


def weights_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def edit(file, **values):
    content = json.loads(file.read_text(encoding="utf-8")) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "remove"}, indent=2) + "\n")


def config_of(folder, name="config.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 5], ids="config-of-transformers-{}".format)
def test_a_round_trip_changes_only_the_names_of_the_weight_files(source, trained, tmp_path, capsys, version):
    if version == 4:
        rope = config_of(source)["rope_parameters"]
        older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "float32"}
        edit(source / "config.json", rope_parameters="remove", dtype="remove", **older)
    out = exported(trained(source), tmp_path / "out")
    assert capsys.readouterr().err == ""
    assert files_of(out) == files_of(source)
    before, after = weights_of(source), weights_of(out)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    again = exported(trained(out, name="again"), tmp_path / "twice")
    assert files_of(again) == files_of(source)


def test_transformers_reads_the_same_before_and_after(source, trained, tmp_path):
    out = exported(trained(source), tmp_path / "out")
    assert LlamaConfig.from_pretrained(out).to_dict() == LlamaConfig.from_pretrained(source).to_dict()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [258, 259]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.chat_template["tools"] == "{{ tools }}"


@pytest.mark.parametrize(("seq_len", "expected"), slow_after(1, [(1024, 1024), (128, 512)], unpack=True))
def test_the_length_is_the_larger_one_of_model_and_training(source, trained, tmp_path, seq_len, expected):
    out = exported(trained(source, f"seq_len={seq_len}", "model.rope_scaling.factor=16"), tmp_path / "out")
    config = config_of(out)
    assert config["max_position_embeddings"] == expected
    assert config["rope_parameters"] == config_of(source)["rope_parameters"] | {"factor": 16.0}


@pytest.mark.slow
def test_a_yarn_rule_keeps_the_original_length(source, trained, tmp_path):
    """Without its original length YaRN takes max_position_embeddings, which grows when training rows are longer."""
    edit(source / "config.json", rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4})
    out = exported(trained(source, "seq_len=1024"), tmp_path / "out")
    assert config_of(out)["max_position_embeddings"] == 1024
    before, after = (
        ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig.from_pretrained(folder), "cpu")[0] for folder in (source, out)
    )
    assert torch.equal(before, after)


@pytest.mark.slow
def test_settings_that_were_changed_are_written(source, trained, tmp_path):
    changes = ("model.rope_theta=1e6", "model.rope_scaling.kind=none", "model.norm_eps=1e-3", "attention.dropout=0.25")
    config = config_of(exported(trained(source, *changes), tmp_path / "out"))
    expected = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-3}
    assert config == config_of(source) | expected | {"attention_dropout": 0.25}


@pytest.mark.slow
def test_config_has_the_dtype_of_the_weights(source, trained, tmp_path):
    out = exported(trained(source), tmp_path / "out", "--dtype", "bf16")
    assert config_of(out) == config_of(source) | {"dtype": "bfloat16"}
    assert {tensor.dtype for tensor in weights_of(out).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_given_end_token_is_in_every_file(source, trained, tmp_path):
    out = exported(trained(source, "data.eos=<|im_end|>", "data.bos="), tmp_path / "out")
    assert config_of(out)["eos_token_id"] == config_of(out, "generation_config.json")["eos_token_id"] == [259, 258]
    assert config_of(out)["bos_token_id"] is None
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token is None
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    checkpoint = trained(out, name="again") / "checkpoints" / "step-000001.ckpt"
    ids = torch.load(checkpoint, weights_only=True)["PackedDataModule"]["token_ids"]
    assert (ids["bos"], ids["eos"]) == (None, 259)


def test_a_bare_tokenizer_gets_the_file_that_names_its_tokens(source, trained, tmp_path):
    (tmp_path / "bare").mkdir()
    bare = write_tokenizer(tmp_path / "bare" / "tokenizer.json", ["<a>", "<b>"])
    out = exported(trained(source, f"data.tokenizer={bare}", "data.eos=<b>"), tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == bare.read_bytes()
    assert AutoTokenizer.from_pretrained(out).eos_token == "<b>"
    assert config_of(out)["eos_token_id"] == config_of(out, "generation_config.json")["eos_token_id"] == 257
    assert not (out / "chat_template.jinja").exists()  # it belongs to a tokenizer that the run did not use
    assert (out / "README.md").read_bytes() == (source / "README.md").read_bytes()


def test_a_run_on_bytes_exports_no_tokenizer_and_the_next_run_knows(source, trained, tmp_path):
    out = exported(trained(source, "data.tokenizer=bytes"), tmp_path / "out")
    assert not {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} & files_of(out).keys()
    assert config_of(out)["eos_token_id"] == config_of(out, "generation_config.json")["eos_token_id"] == 257
    checkpoint = trained(out, name="again") / "checkpoints" / "step-000001.ckpt"
    assert torch.load(checkpoint, weights_only=True)["PackedDataModule"]["tokenizer"] == "bytes-259"
    assert files_of(exported(tmp_path / "again", tmp_path / "twice")) == files_of(out)


def test_a_run_without_text_keeps_the_tokenizer_of_its_model(source, trained, tmp_path):
    run_dir = trained(source, "data=recall", "data.n_pairs=4", "data.n_keys=8", "data.n_values=8")
    assert files_of(exported(run_dir, tmp_path / "out")) == files_of(source)


@pytest.mark.slow
def test_a_resumed_run_remembers_the_first_model(source, trained, tmp_path):
    run_dir = trained(source, "stop_after=1", "max_steps=2")
    trained(source, "resume=last", "max_steps=2")
    assert (run_dir / "checkpoints" / "step-000002.ckpt").is_file()
    assert files_of(exported(run_dir, tmp_path / "out")) == files_of(source)


@pytest.mark.parametrize("change", slow_after(1, ["edited", "removed", "folder removed"]))
def test_a_file_that_changed_since_is_named_and_not_written(source, trained, tmp_path, capsys, change):
    run_dir = trained(source)
    expected = files_of(source)
    if change == "removed":
        (source / "generation_config.json").unlink()
    elif change == "edited":
        (source / "generation_config.json").write_text("{}")
    else:
        source.rename(tmp_path / "elsewhere")
    out = exported(run_dir, tmp_path / "out")
    (line,) = capsys.readouterr().err.splitlines()
    says = "has changed since the run" if change == "edited" else "is no longer there"
    assert "generation_config.json" in line and says in line and "copy it there by hand" in line
    if change == "folder removed":
        assert "tokenizer.json was not written" in line and files_of(out) == {"config.json": expected["config.json"]}
    else:
        del expected["generation_config.json"]
        assert files_of(out) == expected


@pytest.mark.slow
def test_force_removes_the_files_of_the_earlier_model(source, trained, tmp_path):
    out = exported(trained(source), tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    bytes_run = trained(source, "data.tokenizer=bytes", name="bytes")
    files = files_of(exported(bytes_run, out, "--force"))
    assert files.keys() == files_of(exported(bytes_run, tmp_path / "new")).keys() | {"notes.txt"}
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("exists", slow_after(1, [True, False]))
def test_a_write_that_fails_leaves_the_folder_as_it_was(source, trained, tmp_path, monkeypatch, capsys, exists):
    run_dir, out = trained(source), tmp_path / "out"
    if exists:
        exported(run_dir, out)
    before = files_of(out), weights_of(out)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flash_train.cli.run.export_files.write_bytes", full)
    with pytest.raises(SystemExit):
        export_command.main([str(run_dir), str(out), "--force"])
    assert f"folder={out}: " in capsys.readouterr().err
    assert out.exists() == exists and files_of(out) == before[0] and weights_of(out).keys() == before[1].keys()
    assert not list(tmp_path.glob(".out*")) and not list(out.glob(".*"))


@pytest.mark.slow
def test_the_folder_has_the_usual_permissions(source, trained, tmp_path):
    (tmp_path / "usual").mkdir()
    assert exported(trained(source), tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode
