"""Each error message advises something, and the advice works."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from flash_train.cli import train as command
from flash_train.model import ModelConfig, Transformer, save_pretrained
from tests.support.data.tokenizers import write_tokenizer
from tests.support.tiers import slow_after

SHAPE = {"n_layers": 1, "width": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "mlp_width": 32}


@pytest.fixture
def flash_train(in_this_process, tiny):
    """A short run; with `init_from` it takes the shape of that model."""
    run = in_this_process(command.main)

    def with_defaults(*arguments):
        given = {text.partition("=")[0] for text in arguments}
        shared = [text for text in tiny if text.partition("=")[0] not in given]
        if "init_from" in given:
            shared = [text for text in shared if not text.startswith("model.")]
        return run(*shared, *[text for text in arguments if not text.endswith("=LEFT OUT")])

    return with_defaults


@pytest.fixture
def model(tmp_path):
    """A function that writes a model with this vocab_size; `values` go into its config.json."""

    def write(vocab_size=320, name="model", **values):
        shape = ModelConfig(vocab_size=vocab_size, **SHAPE)
        folder = save_pretrained(Transformer(shape, attention="sdpa"), shape, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        return folder

    return write


def refusal(flash_train, *arguments):
    code, lines = flash_train(*arguments)
    assert code in (1, 3) and len(lines) == 1, lines
    return lines[0]


def works(flash_train, *arguments):
    code, lines = flash_train(*arguments)
    assert code == 0, lines
    return True


@pytest.mark.parametrize(
    "files", slow_after(1, [["tokenizer.model"], [], ["vocab.json", "merges.txt"], ["tokenizer_config.json"]])
)
def test_a_model_without_a_tokenizer_json(flash_train, model, tmp_path, files):
    folder = model()
    for name in files:
        (folder / name).write_text("{}")
    line = refusal(flash_train, f"init_from={folder}")
    assert f"init_from={folder}: has no tokenizer.json" in line and all(name in line for name in files[:1])
    assert "data.tokenizer=FILE" in line and "data.tokenizer=bytes" in line
    assert works(flash_train, f"init_from={folder}", "data.tokenizer=bytes")
    file = write_tokenizer(tmp_path / "tokens.json", ["</s>"])
    assert works(flash_train, f"init_from={folder}", f"data.tokenizer={file}", f"run_dir={tmp_path / 'second'}")


def test_a_tilde_in_init_from_is_expanded(flash_train, model, tmp_path, monkeypatch):
    """A shell expands `~` on the command line, but not inside quotes."""
    write_tokenizer(model() / "tokenizer.json", ["<s>", "</s>"])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert works(flash_train, "init_from='~/model'")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-000003.ckpt", weights_only=True)["PackedDataModule"]
    assert saved["tokenizer_file"] == str(tmp_path / "model" / "tokenizer.json")


@pytest.mark.parametrize("specials", slow_after(1, [["<a>", "<b>"], ["</s>", "<|endoftext|>"]]), ids=["unknown", "two"])
def test_an_unknown_end_token(flash_train, model, specials):
    folder = model()
    write_tokenizer(folder / "tokenizer.json", specials)
    line = refusal(flash_train, f"init_from={folder}")
    assert "give data.eos=TOKEN, a token of the vocabulary" in line
    token = re.search(r"its special tokens: (\S+?),", line)[1]
    assert works(flash_train, f"init_from={folder}", f"data.eos={token}")


@pytest.mark.parametrize("token", slow_after(1, ["<|end of text|>", "[SEP]", "it's", "a=b", "0", "~"]))
def test_any_token_can_be_given(flash_train, tmp_path, token):
    file = write_tokenizer(tmp_path / "tokens.json", ["<a>", token])
    assert works(flash_train, f"data.tokenizer={file}", f"data.eos={token}", "data.bos=")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-000003.ckpt", weights_only=True)["PackedDataModule"]
    assert saved["token_ids"] == {
        "bos": None,
        "eos": (i := Tokenizer.from_file(str(file)).token_to_id(token)),
        "pad": i,
    }


@pytest.mark.parametrize("key", slow_after(1, ["data.eos", "data.bos"]))
def test_tokens_for_bytes(flash_train, tmp_path, key):
    line = refusal(flash_train, f"{key}=</s>")
    assert f"{key}=</s>: bytes have their own begin and end tokens" in line and "data.tokenizer=FILE with it" in line
    file = write_tokenizer(tmp_path / "tokens.json", ["<s>", "</s>"])
    assert works(flash_train, f"{key}=</s>", f"data.tokenizer={file}")


def test_a_pad_token_beyond_the_models_vocabulary_is_replaced_by_eos(flash_train, model, tmp_path):
    folder = model(vocab_size=258)
    write_tokenizer(folder / "tokenizer.json", ["<s>", "</s>", "<pad>"])
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}')
    assert works(flash_train, f"init_from={folder}")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-000003.ckpt", weights_only=True)["PackedDataModule"]
    assert saved["token_ids"] == {"bos": 256, "eos": 257, "pad": 257}


def test_a_tokenizer_with_more_tokens_than_the_model(flash_train, model, tmp_path):
    folder = model(vocab_size=257)
    own = write_tokenizer(tmp_path / "own.json", ["</s>"])
    other = Tokenizer.from_file(str(own))
    other.add_tokens(["quick", "brown"])
    other.save(str(folder / "tokenizer.json"))
    line = refusal(flash_train, f"init_from={folder}")
    assert "has 259 ids" in line and "257; allowed: data.tokenizer=FILE, the tokenizer that it was trained with" in line
    assert works(flash_train, f"init_from={folder}", f"data.tokenizer={own}")


@pytest.mark.parametrize(
    "arguments", [["model=nano"], ["model=pretrained", "model.n_layers=3", "model.vocab_size=999"]]
)
def test_another_shape_than_the_models(flash_train, model, arguments):
    given = [f"init_from={model()}", "data.tokenizer=bytes"]
    line = refusal(flash_train, *given, *arguments)
    choice, keys = re.search(r"allowed: (model=pretrained), and no (.+) \(see", line).groups()
    kept = [text for text in arguments if text.partition("=")[0] not in ("model", *keys.split(", "))]
    assert works(flash_train, *given, choice, *kept)


def test_a_rotary_rule_that_changes_with_the_length(flash_train, model):
    given = [f"init_from={model(max_position_embeddings=32, rope_scaling={'type': 'dynamic', 'factor': 2.0})}"]
    given.append("data.tokenizer=bytes")
    line = refusal(flash_train, *given)
    settings = re.findall(r"model\.rope_scaling\.\S+", line)
    assert settings == ["model.rope_scaling.kind=ntk", "model.rope_scaling.factor=3"]
    assert works(flash_train, *given, *settings)


def test_yarn_without_an_original_length_is_accepted(flash_train, model):
    values = {"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert works(flash_train, f"init_from={model(**values)}", "data.tokenizer=bytes")


def allowed(line):
    return re.search(r"(?:allowed:|must be(?: one of)?) ([^ ,;]+)", line)[1]


def missing(line):
    return re.search(r"(model\.rope_scaling\.kind) is missing; give one of linear, ntk, yarn, llama3;", line)[1]


def original(line, kind):
    (rules, key) = re.search(r"; ([^;]+) need (\S+) too", line).groups()
    return [f"{key}=64"] if kind in rules else []


def needed(line):
    settings = re.search(r"needs (.+) too", line)[1]
    return settings.replace("NUMBER", "2").replace("TOKENS", "64").split()


# Arguments, and the overrides that their error message advises; `{tmp}` is the test's folder.
FOLLOWED = [
    (["model.vocab_size=100"], lambda line: [f"model.vocab_size={allowed(line)}"]),
    (["model.head_dim=7"], lambda line: ["model.head_dim=8"] if "must be even" in line else []),
    (
        ["model.rope_scaling.factor=2"],
        lambda line: [re.search(r"(\S+kind) is missing; give one of", line)[1] + "=linear"],
    ),
    *(
        (["model.rope_scaling.factor=2"], lambda line, kind=kind: [f"{missing(line)}={kind}", *original(line, kind)])
        for kind in ("linear", "ntk", "yarn", "llama3")
    ),
    *(([f"model.rope_scaling.kind={kind}"], needed) for kind in ("linear", "ntk", "yarn", "llama3")),
    (["model.rope_scaling.factor=2", "model.rope_scaling.kind=yarn"], needed),
    (["model.rope_scaling.kind=long"], lambda line: [f"model.rope_scaling.kind={re.search(r', (none)', line)[1]}"]),
    (["precision=fp16-mixed"], lambda line: [f"precision={allowed(line)}"]),
    (["seq_len=1"], lambda line: [f"seq_len={allowed(line)}"]),
    (["optimizer.in_backward=true"], lambda line: [allowed(line)]),
    (["data.val_batches=0"], lambda line: [f"data.val_batches={allowed(line)}"]),
    (["data.packing=best"], lambda line: [f"data.packing={allowed(line)}"]),
    (["data.tokenizer=none.json"], lambda line: [f"data.tokenizer={re.search(r'or (bytes)', line)[1]}"]),
    (["trainer.strategy=fsdp"], lambda line: [f"trainer.strategy={allowed(line)}"]),
    (
        ["validate_only=true"],
        lambda line: [f"{re.search(r'or (init_from)=', line)[1]}={{model}}", "data.tokenizer=bytes"],
    ),
    (
        ["model=pretrained"],
        lambda line: [f"{re.search(r'needs (init_from)=', line)[1]}={{model}}", "data.tokenizer=bytes"],
    ),
    (
        ["data.path={tmp}/bad.txt", "data.tokenizer={tmp}/tokens.json", "data.val_fraction=0.5"],
        lambda line: [f"data.errors={re.search(r'data.errors=(replace)', line)[1]}"],
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="precision=fp16-mixed is no mistake on a GPU")
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "advice"), FOLLOWED, ids=[" ".join(arguments) for arguments, _ in FOLLOWED])
def test_the_advice_works(flash_train, model, tmp_path, arguments, advice):
    folder = model()
    (tmp_path / "bad.txt").write_bytes(b"good text, and then \xff\xfe " * 40)
    write_tokenizer(tmp_path / "tokens.json", ["</s>"])
    arguments = [text.format(tmp=tmp_path) for text in arguments]
    followed = [text.format(model=folder) for text in advice(refusal(flash_train, *arguments))]
    keys = {text.partition("=")[0] for text in followed}
    assert followed
    assert works(flash_train, *[text for text in arguments if text.partition("=")[0] not in keys], *followed)


@pytest.mark.slow
def test_another_learning_rate_than_in_the_checkpoint(flash_train, tmp_path):
    works(flash_train, "stop_after=1", "optimizer.lr=0.01")
    line = refusal(flash_train, "resume=last", "optimizer.lr=0.1")
    assert works(flash_train, "resume=last", f"optimizer.lr={allowed(line)}")


@pytest.mark.slow
def test_a_folder_in_place_of_a_checkpoint(flash_train, tmp_path):
    works(flash_train, "stop_after=1")
    line = refusal(flash_train, f"resume={tmp_path / 'run'}", f"run_dir={tmp_path / 'run'}")
    followed = re.search(r"write (run_dir=\S+ resume=last)", line)[1].split()
    assert works(flash_train, *followed) and Path(tmp_path / "run" / "checkpoints" / "step-000003.ckpt").is_file()
