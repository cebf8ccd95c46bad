"""`resume` reads the options of its run from config.yaml; the command line wins."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from flash_train.cli import train as command
from flash_train.cli.config.compose import compose_config
from flash_train.cli.config.errors import UsageError
from flash_train.cli.config.overrides import read
from flash_train.cli.config.parallel import parallel_plan
from flash_train.cli.config.saved_options import describe_options, with_saved_options


@pytest.fixture
def saved(tmp_path: Path, tiny: list[str]):
    """A function that writes the config.yaml of a run and returns the configuration that resumes it."""

    def resume(*overrides: str, given: tuple[str, ...] = ()):
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(compose_config([*tiny, *overrides])), encoding="utf-8")
        line, file = with_saved_options(read([f"run_dir={run_dir}", "resume=last", *given]))
        assert file in (None, run_dir / "config.yaml")
        return compose_config(line.overrides)

    return resume


def test_options_come_from_the_run(saved, tmp_path):
    values = ("optimizer.betas=[0.8,0.9]", "attention.dropout=0.25", "seed=7", "optimizer.eps=1e-7", "stop_after=2")
    config = saved(*values, "data.errors=skip", "trainer.accelerator=cpu", "logger=wandb", "logger.project='a, b'")
    assert (config.seq_len, config.batch_size, config.seed, config.attention.dropout) == (64, 2, 7, 0.25)
    assert (config.optimizer.betas, config.optimizer.eps) == ([0.8, 0.9], 1e-7)
    assert (config.data.corpus, config.data.path, config.data.errors) == ("text", str(tmp_path / "corpus"), "skip")
    assert (config.logger.name, config.logger.project, config.model.width) == ("wandb", "a, b", 16)
    assert (config.resume, config.stop_after, config.run_dir) == ("last", None, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "key", "expected", "kept"),
    [
        ("seed=3", "seed", 3, ("batch_size", 2)),
        ("attention=standard", "attention.backend", "standard", ("attention.dropout", 0.25)),
        ("memory=checkpoint", "memory.mode", "checkpoint", ("seed", 7)),
        ("model=350m", "model.width", 1024, ("seq_len", 64)),
        ("model=nano", "model.width", 16, ("model.name", "nano")),  # the run has the same choice
        ("optimizer=adamw", "optimizer.lr", 0.5, ("seed", 7)),
        ("data=stdlib", "data.corpus", "stdlib", ("data.val_batches", 1)),
        ("data.packing=concat", "data.packing", "concat", ("data.val_batches", 1)),
        ("logger=wandb", "logger.name", "wandb", ("seed", 7)),
        ("hardware=cpu", "max_steps", 3, ("precision", "bf16-true")),  # the choice's file has 25 steps in fp32
        ("experiment=long_context_131k", "seq_len", 131072, ("seed", 7)),
    ],
)
def test_the_command_line_wins(saved, given, key, expected, kept):
    values = ("seed=7", "attention.dropout=0.25", "optimizer.lr=0.5", "precision=bf16-true")
    config = saved(*values, given=(given,))
    assert OmegaConf.select(config, key) == expected
    assert OmegaConf.select(config, kept[0]) == kept[1]


@pytest.mark.parametrize(
    ("saved_options", "given", "accumulate"),
    [
        (("trainer.devices=2", "accumulate=4"), ("trainer.devices=4",), 2),
        (("trainer.devices=2", "accumulate=4"), ("trainer.devices=1",), 8),
        (("trainer.devices=4", "accumulate=2"), ("parallel=context",), 8),
        (("trainer.devices=2", "parallel=context"), ("parallel=fsdp", "trainer.devices=1"), 1),
        (("trainer.devices=2", "accumulate=4"), ("trainer.devices=4", "accumulate=3"), 3),
        (("trainer.devices=2", "global_batch=12"), ("trainer.devices=3",), 2),
        (("accumulate=4",), ("seed=3",), 4),
    ],
)
def test_other_devices_keep_the_rows_of_a_step(saved, saved_options, given, accumulate):
    config = saved(*saved_options, given=given)
    assert parallel_plan(config).accumulate == accumulate


def test_devices_that_do_not_divide_the_rows_of_a_step_are_refused(saved):
    with pytest.raises(UsageError, match=r"^global_batch=4: must be a multiple of the 6 rows"):
        parallel_plan(saved("trainer.devices=2", given=("trainer.devices=3",)))


def test_a_named_checkpoint_brings_the_options_of_its_run(tmp_path, tiny):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(compose_config([*tiny, "seed=9"])), encoding="utf-8")
    line, file = with_saved_options(read([f"resume={run_dir}/checkpoints/step-000002.ckpt", "run_dir=other"]))
    assert file == run_dir / "config.yaml"
    config = compose_config(line.overrides)
    assert (config.seed, config.run_dir) == (9, "other")


def test_without_a_run_nothing_is_read(tmp_path):
    for arguments in (["seq_len=64"], [f"run_dir={tmp_path}", "resume=last"], ["resume=elsewhere/step-000001.ckpt"]):
        assert with_saved_options(read(arguments)) == (read(arguments), None)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no keys"),
        (b"seq_len: [1", "expected"),
        (b"seq_len: 64\n\xff\xfe", "codec"),
        (b"- 1\n- 2\n", "no keys"),
        (b"seq_len: abc\ndata: {corpus: text}\nlogger: {name: none}\n", "seq_len"),
        (b"nope: 3\ndata: {corpus: text}\nlogger: {name: none}\n", "nope"),
        (b"data: {corpus: nowhere}\nlogger: {name: none}\n", "nowhere"),
        (b"seq_len: 64\n", "damaged"),
        (b"data: 3\n", "damaged"),
        (b"seq_len: ${nope}\ndata: {corpus: text}\nlogger: {name: none}\n", "nope"),
        (b"\0\0\0\0", "damaged"),
    ],
)
def test_a_damaged_config_is_an_error_of_one_line(tmp_path, content, says):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        with_saved_options(read([f"run_dir={tmp_path}", "resume=last"]))
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}: is damaged")
    assert "\n" not in str(caught.value)


def test_a_run_without_config_yaml_takes_the_defaults_and_says_so(tmp_path):
    line = read([f"run_dir={tmp_path}", "resume=last"])
    assert f"options: the defaults, except those on the command line, as there is no {tmp_path}" in str(
        describe_options(*with_saved_options(line))
    )
    assert describe_options(*with_saved_options(read([f"run_dir={tmp_path}"]))) is None
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(compose_config(["hardware=cpu"])), encoding="utf-8")
    assert describe_options(*with_saved_options(line)).startswith(f"options: from {tmp_path / 'config.yaml'}")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.csv", "step,train/loss\n1,2.5\n2,zwei\n", "metrics.csv is damaged in line 3"),
        ("metrics.csv", "\0\0\0\n", "metrics.csv is"),
        ("config.yaml", "seq_len: [", "config.yaml: is damaged"),
    ],
)
@pytest.mark.slow
def test_a_run_resumes_without_options_and_refuses_damaged_files(in_this_process, tiny, tmp_path, file, content, says):
    flash_train = in_this_process(command.main)
    assert flash_train(*tiny, "stop_after=1", "seed=5")[0] == 0
    resume = (f"run_dir={tmp_path / 'run'}", "resume=last")
    path = tmp_path / "run" / file
    whole = path.read_bytes()
    path.write_text(content, encoding="utf-8")
    code, lines = flash_train(*resume)
    assert code == 1 and len(lines) == 1 and says in lines[0], lines
    path.write_bytes(whole)
    assert flash_train(*resume)[0] == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").seed == 5
