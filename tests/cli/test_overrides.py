"""Paths reach the configuration as they were typed, whatever Hydra's grammar makes of their characters."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_train.cli.compose import compose_config
from flash_train.cli.errors import UsageError
from flash_train.cli.overrides import parse, quote, read
from flash_train.cli.train import prepare

PATHS = [
    "runs/a/checkpoints/step-000100.ckpt",
    "runs/epoch=0-step=9.ckpt",
    "with space/and,comma",
    "[ab]",
    "a[0-9]*.ckpt",
    "it's",
    'say "hi"',
    "back\\slash\\",
    "back\\'quote",
    "{x}",
    "(1)",
    "007",
    "1e3",
    "true",
    "runs/ünï",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["resume", "init_from", "run_dir", "data.cache_dir"])
def test_a_path_is_taken_as_it_is(key, path):
    config = compose_config(read([f"{key}={path}"]).overrides)
    for part in key.split("."):
        config = config[part]
    assert config == path


@given(st.text(st.characters(blacklist_characters="\n\r\0$", blacklist_categories=["Cs"]), min_size=1))
def test_any_text_survives_quoting(text):
    assert parse(quote("resume", text)).value() == text


def test_home_is_expanded():
    (override,) = read(["resume=~/x/epoch=0.ckpt"]).overrides
    assert parse(override).value() == os.path.expanduser("~/x/epoch=0.ckpt")


@pytest.mark.parametrize(
    "text", ["resume=null", "resume='a b'", 'resume="a b"', "resume=", "seq_len=[ab]", "model=nano"]
)
def test_what_needs_no_quotes_is_left_alone(text):
    assert read([text]).overrides == (text,)


def test_a_list_of_paths_stays_a_list():
    config = compose_config(read(["data=text", "data.path=[a.txt,b/*.md]"]).overrides)
    assert config.data.path == ["a.txt", "b/*.md"]


def test_a_sweep_over_paths_stays_a_sweep():
    assert read(["-m", "resume=a.ckpt,b.ckpt"]).overrides == ("resume=a.ckpt,b.ckpt",)
    assert read(["resume=a.ckpt,b.ckpt"]).overrides == ("resume='a.ckpt,b.ckpt'",)


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["seq_len=1", "-m", "seed=1,2"], ["-m"]),
        (["--cfg", "job", "seq_len=1"], ["--cfg", "job"]),
        (["seq_len=1", "-c", "job", "--resolve"], ["-c", "job", "--resolve"]),
        (["--config-dir", "mine", "seq_len=1"], ["--config-dir", "mine"]),
    ],
)
def test_hydras_flags_are_passed_on(arguments, flags):
    line = read(arguments)
    assert list(line.flags) == flags
    assert "seq_len=1" in line.arguments()


@pytest.mark.parametrize("flag", [["--help"], ["--hydra-help"], ["--info", "plugins"], ["-sc"], ["-cn", "other"]])
def test_help_is_not_kept_waiting(flag, monkeypatch):
    monkeypatch.setattr("flash_train.cli.hardware.detect", None)
    assert prepare(flag) == flag


@pytest.mark.parametrize(("text", "says"), [("seq_len", "key=value"), ("seq_len=~/x", "quote"), ("x=[1", "quote")])
def test_a_mistake_in_the_grammar_says_what_to_do(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse(text)
    assert str(caught.value).startswith(text.partition("=")[0])


def test_resume_goes_on_in_the_directory_of_its_checkpoint():
    arguments = prepare(["hardware=cpu", "resume=some where/checkpoints/step-000001.ckpt"])
    assert compose_config(arguments).run_dir == "some where"
    arguments = prepare(["hardware=cpu", "resume=elsewhere/step-000001.ckpt"])
    assert compose_config(arguments).run_dir.startswith("runs/")
    arguments = prepare(["hardware=cpu", "resume=a/checkpoints/step-000001.ckpt", "run_dir=b"])
    assert compose_config(arguments).run_dir == "b"


def test_init_from_brings_its_shape(tmp_path):
    assert compose_config(prepare(["hardware=cpu", f"init_from={tmp_path}"])).model.name == "pretrained"
    assert compose_config(prepare(["hardware=cpu", f"init_from={tmp_path}", "model=350m"])).model.name == "350m"
