"""Paths reach the configuration as they were typed, even with characters that have a meaning in Hydra's grammar."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.help import HARDWARE_LATER, help_text
from flash_train.cli.config.overrides import override_text, parse, quote, read
from flash_train.cli.run.prepare import prepare

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
def test_a_path_is_taken_literally(key, path):
    config = compose_config(read([f"{key}={path}"]).overrides)
    for part in key.split("."):
        config = config[part]
    assert config == path


@given(st.text(st.characters(blacklist_characters="\n\r\0$", blacklist_categories=["Cs"]), min_size=1))
def test_any_text_survives_quoting(text):
    assert parse(quote("resume", text)).value() == text


@pytest.mark.parametrize("key", ["resume", "run_dir", "data.cache_dir", "data.path"])
def test_an_unknown_home_folder_is_named(key, monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # happens without HOME, for a user id without an entry
    with pytest.raises(UsageError, match=rf"^{key}=~/x: no home folder is known for ~"):
        read([f"{key}=~/x"])


def test_home_is_expanded():
    (override,) = read(["resume=~/x/epoch=0.ckpt"]).overrides
    assert parse(override).value() == os.path.expanduser("~/x/epoch=0.ckpt")


@pytest.mark.parametrize(
    "text", ["resume=null", "resume='a b'", 'resume="a b"', "resume=", "seq_len=[ab]", "model=nano"]
)
def test_text_that_needs_no_quotes_is_not_changed(text):
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


def test_further_ranks_accept_the_overrides_that_lightning_adds(monkeypatch):
    added = ("hydra.run.dir=x", "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read([*added]).overrides == added
    with pytest.raises(UsageError, match="hydra.sweep.dir"):
        read(["hydra.sweep.dir=x"])


def test_help_says_that_the_hardware_is_chosen_later():
    assert HARDWARE_LATER in help_text(read(["--help"])) and HARDWARE_LATER not in help_text(read(["hardware=cpu"]))


@pytest.mark.parametrize("flag", [["--help"], ["--hydra-help"], ["-sc", "install=bash"]])
def test_help_does_not_look_for_hardware(flag, monkeypatch):
    monkeypatch.setattr("flash_train.cli.config.hardware.detect", None)
    assert prepare(flag) == flag


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-cn", "other"], ["--config-name (-cn) other", "--config-dir"]),
        (["-cp", "other"], ["--config-path (-cp) other", "--config-dir"]),
        (["--experimental-rerun", "x"], ["--experimental-rerun x", "resume=last"]),
        (["-m", "--cfg", "job", "seed=0,1"], ["--multirun (-m) and --cfg (-c)", "one of them"]),
        (["-m", "--info", "all"], ["--multirun (-m) and --info (-i)"]),
        (["--help", "-m"], ["--multirun (-m) and --help (-h)"]),
        (["--resolve"], ["--resolve", "--cfg job"]),
        (["-p", "model"], ["--package (-p) model", "--cfg job"]),
        (["--cfg", "job", "-p", "nope"], ["--package (-p) nope", "no such part", "model"]),
        (["-cd", "nowhere"], ["--config-dir (-cd) nowhere", "no such folder"]),
        (["-sc"], ["--shell-completion (-sc)", "install=SHELL"]),
        (["-sc", "install=bsh"], ["install=bsh", "did you mean bash?"]),
        (["hydra.sweeper.params=x"], ["hydra.sweeper.params", "run_dir=FOLDER", "-m"]),
        (["hydra/launcher=joblib"], ["hydra/launcher", "-m"]),
        (["hydra.run.dir=x", "run_dir=y"], ["hydra.run.dir: ", "run_dir=FOLDER"]),
        (["hydra.output_subdir=x"], ["hydra.output_subdir: ", "run_dir=FOLDER"]),
        (["~model"], ["~model", "model=VALUE"]),
        (["model@x=nano"], ["model@x", "model=VALUE"]),
        (["=3"], ["=3", "no key"]),
        ([""], ["''", "key=value"]),
    ],
    ids=lambda x: " ".join(x),
)
def test_error_for_a_wrong_flag_or_key_gives_advice(arguments, says):
    with pytest.raises(UsageError) as caught:
        prepare(arguments)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ("seed=range(0)", "has no values"),
        ("seed=range(3,1)", "has no values"),
        ("seed=range(1,2,0)", "a step of 0"),
        ("optimizer.lr=interval(0,1)", "not listed"),
        ("model=glob(*)", "not listed"),
        ("seed=shuffle(1,2)", "fixed order"),
        ("seed=range(0,10000000000)", "more than 1000 runs"),
    ],
)
def test_a_sweep_without_a_list_of_values_is_refused(sweep, says):
    with pytest.raises(UsageError, match=says) as caught:
        prepare(["hardware=cpu", "-m", sweep])
    assert str(caught.value).startswith(sweep)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab'\\,[]{} =1é"), st.lists
    )
)
def test_any_value_survives_as_an_override(value):
    assert parse(override_text("x", value)).value() == value


@pytest.mark.parametrize(("text", "says"), [("seq_len", "key=value"), ("seq_len=~/x", "quote"), ("x=[1", "quote")])
def test_error_in_the_override_grammar_starts_with_the_key(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        parse(text)
    assert str(caught.value).startswith(text.partition("=")[0])


def test_resume_continues_in_the_directory_of_its_checkpoint():
    arguments = prepare(["hardware=cpu", "resume=some where/checkpoints/step-000001.ckpt"])
    assert compose_config(arguments).run_dir == "some where"
    arguments = prepare(["hardware=cpu", "resume=elsewhere/step-000001.ckpt"])
    assert compose_config(arguments).run_dir.startswith("runs/")
    arguments = prepare(["hardware=cpu", "resume=a/checkpoints/step-000001.ckpt", "run_dir=b"])
    assert compose_config(arguments).run_dir == "b"


def test_init_from_selects_the_pretrained_shape(tmp_path):
    assert compose_config(prepare(["hardware=cpu", f"init_from={tmp_path}"])).model.name == "pretrained"
    assert compose_config(prepare(["hardware=cpu", f"init_from={tmp_path}", "model=350m"])).model.name == "350m"
