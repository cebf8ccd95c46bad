import json
from dataclasses import replace

import pytest

from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import OutOfMemoryError, UnavailableError, UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.sweep import find_max as command
from flash_train.cli.sweep import find_max_options as options
from flash_train.cli.sweep.trial import Result, keep
from flash_train.model import ModelConfig
from flash_train.model.recompute import MEMORY_MODES
from flash_train.profiling.memory.longest import UNIT
from flash_train.profiling.memory.prediction import predict
from flash_train.profiling.memory.step import Step, training_backends

MODEL = ModelConfig(vocab_size=320, n_layers=8, width=512, n_heads=8, n_kv_heads=8, head_dim=64, mlp_width=1408)


def split(*arguments):
    return options.split(read(list(arguments)))


def test_choices_equal_the_library():
    """The options repeat them, because mistakes are reported before the library is imported."""
    assert (
        tuple(MEMORY_MODES) == options.MODES == options.MEMORY[:-1]
        and set(options.ATTENTIONS) == set(training_backends())
        and options.UNIT == UNIT
    )


def test_find_max_options_are_parsed():
    line, asked = split("model=1b3", "find_max=true", "find_max.limit=4096", "find_max.memory=[checkpoint]")
    assert line.overrides == ("model=1b3",)
    assert asked == options.Search(4096, ("checkpoint",), None)
    assert split("model=1b3")[1] is None and split("find_max=false", "seq_len=512")[1] is None


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", (1 << 20, ("flash", "standard"))), ("cpu", (16384, ("sdpa", "standard")))],
)
def test_defaults_depend_on_the_device(device, expected):
    assert options.Search().on(device == "cuda") == expected
    assert options.Search(960, attention=("chunked",)).on(device == "cuda") == (960, ("chunked",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["find_max=maybe"], "find_max=maybe: must be true or false"),
        (["find_max.limit=10"], "find_max.limit=10: must be a multiple of 64"),
        (["find_max.limit=0"], "find_max.limit=0: must be a multiple of 64, and 64 or more"),
        (["find_max.limit=600"], "find_max.limit=600: must be a multiple of 64"),
        (["find_max.limit=128"], "find_max.limit belongs to the search for the longest row; add find_max=true"),
        (["find_max.memory=checkpoint"], "must be a list of none, selective, checkpoint"),
        (["find_max.attention=[flush]"], "must be a list of chunked, flash, hopper, sdpa, standard, triton"),
        (["find_max.memory=[none,none]"], "must be different values"),
        (["find_max.most=4"], "find_max.most: no such key"),
        (["find_max=true", "seq_len=512"], "seq_len=512: find_max=true sets it"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    with pytest.raises(UsageError, match=words.replace("[", r"\[")) as error:
        split(*arguments)
    assert "\n" not in str(error.value)


def test_the_guess_counts_on_inputs_in_the_hosts_memory():
    step = Step(replace(MODEL, n_layers=8), 512, memory="checkpoint")
    limit = predict(replace(step, seq_len=1024 * UNIT)).peak_bytes
    guesses = [command.predicted_longest(step, limit, 2**20, host_bytes) for host_bytes in (None, 2**26, 2**40)]
    assert guesses == sorted(guesses) and guesses[2] > 1.1 * guesses[0]
    tried = replace(step, offload=1.0, seq_len=guesses[2] + UNIT)
    assert predict(replace(tried, seq_len=guesses[2])).peak_bytes <= limit < predict(tried).peak_bytes


@pytest.mark.parametrize("memory", ["none", "selective", "checkpoint"])
def test_the_guess_is_the_longest_that_is_predicted_to_fit(memory):
    step = Step(MODEL, 512, memory=memory)
    limit = 3 * 2**30
    guess = command.predicted_longest(step, limit, 1 << 20)
    assert predict(Step(MODEL, guess, memory=memory)).peak_bytes <= limit
    assert predict(Step(MODEL, guess + UNIT, memory=memory)).peak_bytes > limit
    assert command.predicted_longest(step, limit, 1000) == 960


def test_several_devices_are_predicted_with_the_best_plan(tiny, monkeypatch):
    seen = []

    def longest(step, most, limit, host_bytes):
        seen.append((step.dims.shard, step.dims.context))
        return 100 * step.dims.shard - step.dims.context

    monkeypatch.setattr(command, "predicted_longest", longest)
    config = compose_config((*tiny, "trainer.devices=2", "attention=standard"), None)
    assert command.predicted_length(config, 1 << 20) == 199
    assert seen == [(1, 1), (2, 1), (2, 2)]
    seen.clear()
    command.predicted_length(compose_config((*tiny, "trainer.devices=2", "parallel=ddp"), None), 1 << 20)
    assert seen == [(1, 1)]


def test_interrupted_search_continues(tiny, tmp_path, monkeypatch, capsys):
    """The device holds 1,300 tokens, the prediction is 1,000, and the process dies in its second trial."""
    trials = []

    def run_trial(trial):
        length = int(trial.name.rpartition("-")[2])
        trials.append(length)
        if len(trials) == 2:
            raise KeyboardInterrupt
        result = (
            Result("ok", summary={"peak_memory_gib": length / 1000}) if length <= 1300 else Result("oom", "too long")
        )
        trial.folder.mkdir(parents=True)
        keep(trial, result)
        return result

    monkeypatch.setattr(command, "run_trial", run_trial)
    monkeypatch.setattr(command, "predicted_longest", lambda *_: 1024)
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "logger", "run_dir"))])
    asked = options.Search(1 << 20, ("none",), ("sdpa",))
    with pytest.raises(KeyboardInterrupt):
        command.find_max(line, asked, tmp_path / "search")
    command.find_max(line, asked, tmp_path / "search")
    assert trials[0] == 960 and trials.count(960) == 1 and trials[1] == trials[2] == 1024
    (record,) = json.loads((tmp_path / "search" / "find_max.json").read_text())["records"]
    assert record["seq_len"] <= 1300 < record["too_long"]
    assert record["peak_memory_gib"] == record["seq_len"] / 1000
    assert {"find_max.md", "find_max.png"} <= {path.name for path in (tmp_path / "search").iterdir()}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  sdpa-none-960: trying" and lines[1].startswith("  sdpa-none-960: fits")
    assert lines[2] == "  sdpa-none-1024: trying" and lines.count(lines[0]) == 1 and lines.count(lines[2]) == 2
    assert any(line.startswith("attention=sdpa memory=none") for line in lines)


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, [98_368, 100_352]), (49_984, [49_984])])
def test_a_good_prediction_takes_two_trials_and_one_at_the_limit(limit, expected, tiny, tmp_path, monkeypatch):
    """The device holds a little less than the predicted length."""
    trials = []

    def run_trial(trial):
        trials.append(int(trial.name.rpartition("-")[2]))
        return Result("ok" if trials[-1] <= 100_000 else "oom")

    monkeypatch.setattr(command, "run_trial", run_trial)
    monkeypatch.setattr(command, "predicted_longest", lambda _step, _bytes, most, _host: min(100_352, most))
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "logger", "run_dir"))])
    command.find_max(line, options.Search(limit, ("none",), ("sdpa",)), tmp_path / "search")
    assert trials == expected
    (record,) = json.loads((tmp_path / "search" / "find_max.json").read_text())["records"]
    at_limit = limit == 49_984
    assert record["limit"] == limit and record["exact_to"] == (None if at_limit else command.TOLERANCE)
    assert ("| ≥ 49,984 (the limit) |" in (tmp_path / "search" / "find_max.md").read_text()) == at_limit


def test_failed_trial_ends_only_its_row(tiny, tmp_path, monkeypatch, capsys):
    """A row of the standard backend is one document, since short documents need much less memory."""
    packings = []

    def run_trial(trial):
        packings.append([text for text in trial.overrides if "packing" in text])
        return Result("failed", "an illegal address") if "sdpa" in trial.name else Result("ok")

    monkeypatch.setattr(command, "run_trial", run_trial)
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "logger", "run_dir"))])
    asked = options.Search(512, ("none",), ("sdpa", "standard"))
    command.find_max(line.with_override("logger", "none"), asked, tmp_path / "search")
    failed, found = json.loads((tmp_path / "search" / "find_max.json").read_text())["records"]
    assert "attention=standard memory=none: ≥ 512 tokens (the limit), 1 trial" in (told := capsys.readouterr().out)
    assert failed["seq_len"] == 0 and failed["status"] == "failed"
    assert failed["reason"] == "the trial at 512 tokens: an illegal address"
    assert found["seq_len"] == 512 and packings == [[], ["data.packing=concat"]]
    assert "sdpa-none-512: failed, an illegal address" in told


def test_results_are_logged_to_wandb(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(command, "run_trial", lambda trial: Result("ok", summary={"peak_memory_gib": 1.0}))
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "logger", "run_dir"))])
    command.find_max(line, options.Search(512, ("none",), ("sdpa",)), tmp_path / "search")
    assert list((tmp_path / "search" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    ("ended", "error"), [("failed", UsageError), ("unavailable", UnavailableError), ("oom", OutOfMemoryError)]
)
def test_search_without_a_result_exits_with_an_error(ended, error, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_trial", lambda trial: Result(ended, "a reason"))
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "run_dir"))])
    with pytest.raises(UsageError, match=rf"no search ended ok \(2 {ended}\); .*find_max.md says why") as stop:
        command.find_max(line, options.Search(512, ("none", "selective"), ("sdpa",)), tmp_path / "search")
    assert type(stop.value) is error
    assert "a reason" in (tmp_path / "search" / "find_max.md").read_text()


def test_unavailable_backend_is_an_error(tiny, tmp_path):
    line = read([text for text in tiny if not text.startswith(("seq_len", "max_steps", "logger", "run_dir"))])
    with pytest.raises(UnavailableError):
        command.find_max(line, options.Search(512, ("none",), ("flash",)), tmp_path / "search")
    (record,) = json.loads((tmp_path / "search" / "find_max.json").read_text())["records"]
    assert record["seq_len"] == 0 and "no NVIDIA GPU" in record["reason"]
    assert record["status"] == "unavailable" and record["predicted_seq_len"] is None
