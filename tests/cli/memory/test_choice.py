"""What `memory.keep=auto`, `memory.offload=auto` and the optimizer's options choose by the predicted memory."""

from dataclasses import replace

import pytest

from flash_train.cli.config.errors import UsageError
from flash_train.cli.memory import choice
from flash_train.profiling.memory.prediction import predict
from tests.cli.memory.test_parallel_choice import CPU, config_of, step_for


def test_the_optimizer_gives_up_what_does_not_fit(monkeypatch, capsys):
    """8-bit moments come before a master that is not exact. A setting that the user gives stays."""

    def chosen(limit: int, *given: str) -> tuple[str, str | None]:
        config = config_of("precision=bf16-true", *given)
        step = step_for(config, master=config.optimizer.master or "exact", moments=config.optimizer.moments)
        monkeypatch.setattr(choice, "memory_of_rank", lambda *_: limit)
        found = choice.choose_optimizer_formats(config, step, CPU)
        if capsys.readouterr().out:  # then the run's configuration has it, too
            assert (config.optimizer.master, config.optimizer.moments) == (found.master, found.moments)
        return found.master, found.moments

    step = step_for(config_of("precision=bf16-true"))
    formats = [("exact", None), ("exact", "8bit"), ("stochastic", "8bit")]
    peaks = [predict(replace(step, master=master, moments=moments)).peak_bytes for master, moments in formats]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert [chosen(peak) for peak in peaks] == formats
    assert chosen(peaks[-1] - 1) == formats[0]  # none fits, and the run is refused
    assert chosen(peaks[2], "optimizer.master=exact") == ("exact", None)
    assert chosen(peaks[1], "optimizer.master=exact") == ("exact", "8bit")
    assert chosen(peaks[1], "optimizer.moments=fp32") == ("exact", "fp32")


def test_weights_are_updated_within_the_backward_if_only_that_fits(monkeypatch, capsys):
    """Where nothing prevents it, and the user does not say otherwise."""

    def chosen(limit: int, *given: str) -> bool:
        config = config_of("precision=bf16-true", *given)
        step = step_for(config, in_backward=bool(config.optimizer.in_backward))
        monkeypatch.setattr(choice, "memory_of_rank", lambda *_: limit)
        found = choice.choose_step_in_backward(config, step, CPU)
        assert ("within the backward" in capsys.readouterr().out) == (found is not step)
        assert found.in_backward == bool(config.optimizer.in_backward)
        return found.in_backward

    step = step_for(config_of("precision=bf16-true"))
    less, more = (predict(replace(step, in_backward=within)).peak_bytes for within in (True, False))
    assert less < more
    without_clipping = "optimizer.gradient_clip=null"
    assert chosen(more - 1, without_clipping) and chosen(1, without_clipping)
    assert not chosen(more, without_clipping)
    assert chosen(more, without_clipping, "optimizer.in_backward=true")
    for given in ((), (without_clipping, "accumulate=2"), (without_clipping, "optimizer.in_backward=false")):
        assert not chosen(1, *given)


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_keeps_as_many_blocks_as_fit(ranks, monkeypatch, capsys):
    config = config_of(f"trainer.devices={ranks}", "seq_len=4096", "memory.keep=auto")
    step = step_for(config)
    peaks = [predict(replace(step, keep=kept / 6)).peak_bytes for kept in range(7)]
    for kept in range(1, 7):
        monkeypatch.setattr(choice, "memory_of_rank", lambda *_, limit=peaks[kept]: round(limit / 0.95) + 1)
        assert choice.choose_kept_blocks(config, step, CPU).keep == kept / 6
        others = ", the others what memory=checkpoint keeps" if kept < 6 else ""
        assert capsys.readouterr().out == f"memory.keep: {kept} of 6 blocks keep everything{others}\n"
    monkeypatch.setattr(choice, "memory_of_rank", lambda *_: 1)
    assert choice.choose_kept_blocks(config, step, CPU).keep == 0


@pytest.mark.parametrize(("key", "choose"), [("keep", "choose_kept_blocks"), ("offload", "choose_inputs_on_host")])
def test_auto_needs_a_prediction(key, choose, monkeypatch):
    for overrides, limit, why in (("compile=true", 1, "compile=true"), ("", None, "memory of cpu")):
        config = config_of(f"memory.{key}=auto", *overrides.split())
        monkeypatch.setattr(choice, "memory_of_rank", lambda *_, limit=limit: limit)
        with pytest.raises(UsageError, match=rf"^memory.{key}=auto: .*{why}.*; allowed: a share in \[0, 1\]$"):
            getattr(choice, choose)(config, step_for(config), CPU)


def test_auto_offloads_as_few_inputs_as_fit(monkeypatch, capsys):
    config = config_of("memory=offload", "seq_len=4096", "precision=bf16-true")
    step = step_for(config)
    each = 2 * 4096 * step.model.width
    peaks = [predict(replace(step, offload=blocks / 6)).peak_bytes for blocks in range(6)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3  # then the loss needs more

    def chosen(limit: float, host: int) -> int:
        monkeypatch.setattr(choice, "memory_of_rank", lambda *_: round(limit / 0.95) + 1)
        monkeypatch.setattr(choice, "host_memory_of_rank", lambda _: host)
        found = choice.choose_inputs_on_host(config, step, CPU)
        assert predict(found).host_bytes == found.inputs_on_host * each <= host
        return found.inputs_on_host

    for blocks, peak in enumerate(peaks):
        assert chosen(peak, 2**40) == peaks.index(peak), blocks
    assert "5 of 6" not in capsys.readouterr().out
    assert chosen(1, 2**40) == 5  # never fits: all but the last
    assert chosen(1, 3 * each) == 3 and "3 of 6 blocks have their inputs" in (out := capsys.readouterr().out)
    assert out.strip().endswith("the host's memory is the limit")


@pytest.mark.parametrize("offload", ["0.5", "auto"])
def test_blocks_that_keep_everything_have_no_inputs_to_offload(offload):
    config = config_of("memory=none", f"memory.offload={offload}")
    with pytest.raises(UsageError, match=f"^memory.offload={offload}: with memory=none .*allowed: memory=selective"):
        choice.choose_inputs_on_host(config, step_for(config), CPU)
