"""CausalLMModule: training steps and validation in every precision, and the contents of a checkpoint."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from flash_train.data import PackedDataModule, RecallCorpus
from flash_train.model import Transformer
from flash_train.training import CausalLMModule, OptimizerConfig, newest_checkpoint
from tests.support.training.tiny_run import TinyData, packed_row, tiny_config, tiny_module, tiny_trainer

NO_DROPOUT = tiny_config(attention_dropout=0.0, residual_dropout=0.0)
# Far from eps, so that Adam's update does not blow up rounding errors.
SMOOTH = OptimizerConfig(lr=1e-3, eps=1e-2, warmup_steps=0, gradient_clip=0.1)


class Steps(pl.Callback):
    """Collects what each optimizer step reported."""

    def __init__(self):
        self.losses, self.norms, self.rates = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.last_step is not None and pl_module.last_step.step > len(self.losses):
            self.losses.append(pl_module.last_step.loss.item())
            self.norms.append(pl_module.last_step.gradient_norm.item())
            self.rates.append(pl_module.last_step.learning_rate)


def fit(module, batches, *, accumulate, max_steps, plugins=(), **options):
    """Train in a plain `Trainer`; returns what each step reported."""
    steps = Steps()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=max_steps, accumulate_grad_batches=accumulate, callbacks=[steps], logger=False,
        plugins=list(plugins), enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return steps


def stacked(first, second):
    """Two packed rows as one batch."""
    joined = {name: torch.cat([first[name], second[name]]) for name in ("tokens", "labels", "positions")}
    joined["lengths"] = first["lengths"] + second["lengths"]
    joined["cu_seqlens"] = (
        torch.tensor([0, *joined["lengths"], 0, 0]).cumsum(0).to(torch.int32)
    )  # empty entries are last
    return joined


def token_mean(module, batches):
    """Loss and gradient norm over all labels of several batches, computed directly."""
    sums = [module.model.loss(b["tokens"], b["labels"], **module.model_arguments(b)) for b in batches]
    loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
    gradients = torch.autograd.grad(loss, list(module.model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def test_every_token_weighs_the_same_over_micro_batches():
    rows = [packed_row(index) for index in (1, 4)]  # with different numbers of labels
    assert (rows[0]["labels"] != -100).sum() != (rows[1]["labels"] != -100).sum()
    module = tiny_module(config=NO_DROPOUT, optimizer=SMOOTH)
    loss, norm = token_mean(module, rows)
    apart = fit(module, rows, accumulate=2, max_steps=1)
    assert apart.losses == [pytest.approx(loss, rel=1e-6)]
    assert apart.norms == [pytest.approx(norm, rel=1e-5)]
    assert norm > SMOOTH.gradient_clip  # clipping was at work

    together_module = tiny_module(config=NO_DROPOUT, optimizer=SMOOTH)
    fit(together_module, [stacked(*rows)], accumulate=1, max_steps=1)
    for a, b in zip(module.parameters(), together_module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_last_incomplete_accumulation_weighs_the_same():
    """A finite loader may end within an accumulation: Lightning then steps with fewer micro-batches."""
    rows = [packed_row(index) for index in (1, 2, 3)]
    module = tiny_module(config=NO_DROPOUT, optimizer=OptimizerConfig(lr=1e-12, warmup_steps=0))
    expected = token_mean(module, rows[2:])
    steps = fit(module, rows, accumulate=2, max_steps=2)
    assert (steps.losses[1], steps.norms[1]) == (
        pytest.approx(expected[0], rel=1e-6),
        pytest.approx(expected[1], rel=1e-5),
    )


def test_a_step_without_labels_is_harmless():
    row = packed_row(0)
    row["labels"] = torch.full_like(row["labels"], -100)
    module = tiny_module()
    before = [p.detach().clone() for p in module.parameters() if p.ndim == 1]
    steps = fit(module, [row], accumulate=1, max_steps=1)
    assert steps.losses == [0.0]
    assert steps.norms == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, (p for p in module.parameters() if p.ndim == 1), strict=True))


def test_gradients_do_not_outlive_their_step():
    """The next forward pass needs their memory. Gradients that are still being accumulated stay."""
    held = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            held.append(sum(parameter.grad is not None for parameter in pl_module.parameters()))

    module = tiny_module()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, accumulate_grad_batches=2, callbacks=[Look()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([packed_row(i) for i in range(4)], batch_size=None))
    everything = len(list(module.parameters()))
    assert held == [0, everything, 0, everything]


def test_trainers_own_clipping_takes_precedence():
    rows = [packed_row(1)]
    ours, theirs = (
        tiny_module(config=NO_DROPOUT, optimizer=replace(SMOOTH, gradient_clip=clip)) for clip in (0.01, 5.0)
    )
    fit(ours, rows, accumulate=1, max_steps=1)
    fit(theirs, rows, accumulate=1, max_steps=1, gradient_clip_val=0.01)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"gradient_clip_algorithm=.*VALUE: must be norm, or None"):
        fit(tiny_module(), rows, accumulate=1, max_steps=1, gradient_clip_val=1.0, gradient_clip_algorithm="value")


def cpu_scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp16-mixed"])
def test_low_precision_trains_with_clipping(precision):
    """Same results as fp32 within rounding; fp16 with a loss scaler, whose scale must not change the norm."""
    rows = [packed_row(index) for index in range(8)]
    config = OptimizerConfig(lr=1e-2, warmup_steps=0, gradient_clip=0.5)
    exact = fit(tiny_module(config=NO_DROPOUT, optimizer=config), rows, accumulate=2, max_steps=4)
    how = {"plugins": [cpu_scaler()]} if precision == "fp16-mixed" else {"precision": precision}
    module = tiny_module(config=NO_DROPOUT, optimizer=config)
    steps = fit(module, rows, accumulate=2, max_steps=4, **how)
    assert steps.losses == pytest.approx(exact.losses, rel=0.02)
    assert steps.norms == pytest.approx(exact.norms, rel=0.05)
    assert next(module.parameters()).dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_backward_computes_again_under_the_forwards_default_dtype(precision, dtype):
    """Nested checkpoints (of a block and of chunked attention) must recompute the same tensors with every torch."""
    module, seen = tiny_module(config=NO_DROPOUT, attention="chunked", memory="checkpoint"), []
    for block in module.model.blocks:
        next(block.children()).register_forward_hook(lambda *_: seen.append(torch.get_default_dtype()))
    next(module.parameters()).register_hook(lambda _: seen.append(torch.get_default_dtype()))
    fit(module, [packed_row(1)], accumulate=1, max_steps=1, precision=precision)
    assert len(seen) == 2 * len(module.model.blocks) + 1  # forward, again in the backward, and the gradient
    assert set(seen) == {dtype}
    assert torch.get_default_dtype() == torch.float32


class Bigram(torch.nn.Module):
    """A user's own model: without configuration and blocks, and with a submodule named attention."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.Embedding(31, 31)

    def loss(self, tokens, labels, *, positions, packing):
        total = torch.nn.functional.cross_entropy(self.attention(tokens)[0], labels[0], reduction="sum")
        return total, (labels != -100).sum()

    def model_flops(self, n_tokens, pairs):
        return 6 * 31 * 31 * n_tokens


def test_users_own_model_trains_and_resumes(tmp_path):
    def run(module, **options):
        trainer = tiny_trainer(tmp_path, max_steps=4, **options)
        trainer.fit(module, datamodule=TinyData(), ckpt_path=newest(tmp_path) if options == {} else None)
        return module

    def newest(folder):
        return newest_checkpoint(folder / "checkpoints")

    module = run(CausalLMModule(Bigram(), SMOOTH), stop_after=2)
    assert json.loads((tmp_path / "summary.json").read_text())["model"] == "Bigram"
    assert module.hparams["model"] is None and module.attention == "auto"
    weights = run(CausalLMModule(Bigram(), SMOOTH)).model.attention.weight
    loaded = CausalLMModule.load_from_checkpoint(newest(tmp_path), model=Bigram(), weights_only=True)
    assert torch.equal(loaded.model.attention.weight, weights)
    with pytest.raises(ValueError, match="the checkpoint is of another model: "):
        run(tiny_module())
    with pytest.raises(ValueError, match="Bigram has none"):
        CausalLMModule(Bigram(), compile=True)


def test_built_transformer_knows_its_backend():
    built = Transformer(tiny_config(), attention="standard", memory="checkpoint")
    module = CausalLMModule(built)
    assert module.attention == "standard"
    assert (module.hparams["attention"], module.hparams["memory"]) == ("standard", "checkpoint")


def test_other_ways_to_shard_are_refused():
    """Norms of gradients would cover one shard only, and 1-d shards of matrices would not decay."""
    module = tiny_module()
    module.trainer = SimpleNamespace(strategy=FSDPStrategy(), max_steps=3)
    with pytest.raises(ValueError, match="strategy=FSDPStrategy: must be ShardedStrategy to shard the weights"):
        module.configure_optimizers()


def test_a_time_between_validations_is_refused_on_several_devices():
    """Ranks would enter the validation at different steps, and wait for each other forever."""
    module = tiny_module()
    trainer = pl.Trainer(accelerator="cpu", val_check_interval="00:00:00:30", logger=False, enable_checkpointing=False)
    module.trainer = trainer
    module.setup("fit")
    module.trainer = SimpleNamespace(**vars(trainer), world_size=2, strategy=trainer.strategy)
    with pytest.raises(ValueError, match="val_check_interval: must be a number of batches on several devices"):
        module.setup("fit")


def test_overflowing_fp16_step_is_skipped():
    """Gradients that overflow under the scale do not change the weights, and the scale is lowered."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**60))
    module = tiny_module(config=NO_DROPOUT)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(module, [packed_row(1)], accumulate=1, max_steps=1, plugins=[plugin])
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert plugin.scaler.get_scale() == 2.0**59


def test_schedule_goes_by_max_steps():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, min_lr_ratio=0.0)
    steps = fit(tiny_module(optimizer=config), [packed_row(i) for i in range(4)], accumulate=1, max_steps=4)
    assert steps.rates == pytest.approx([0.5, 1.0, 1.0, 0.5])
    with pytest.raises(ValueError, match=r"needs an end: give Trainer\(max_steps=...\)"):
        fit(tiny_module(), [packed_row(0)], accumulate=1, max_steps=-1, max_epochs=-1)


def test_packed_batches_do_not_define_epochs():
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"needs an end: give Trainer\(max_steps=...\)"):
        trainer.fit(tiny_module(), datamodule=TinyData())


def test_fit_that_ends_inside_a_step_leaves_no_gradients():
    class Fail(pl.Callback):
        def on_train_batch_end(self, *arguments):
            raise RuntimeError("amid a step")

    module, rows = tiny_module(config=NO_DROPOUT), [packed_row(i) for i in range(2)]
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, accumulate_grad_batches=2, callbacks=[Fail()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="amid a step"):
        trainer.fit(module, DataLoader(rows, batch_size=None))
    loss, _ = token_mean(module, rows)
    fit(module, rows, accumulate=2, max_steps=1)
    assert module.last_step.loss.item() == pytest.approx(loss, rel=1e-6)


def test_validation(tmp_path):
    module = tiny_module(config=NO_DROPOUT, val_bytes_per_token=2.0, answer_accuracy=True, chance_level=0.25)
    trainer = tiny_trainer(tmp_path)
    (logged,) = trainer.validate(module, datamodule=TinyData(), verbose=False)
    rows = [packed_row(100), packed_row(101)]
    loss, _ = token_mean(module.eval(), rows)
    assert module.validation["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert module.validation["val/bits_per_byte"] == pytest.approx(loss / 0.6931471805599453 / 2, rel=1e-6)
    right = total = 0
    for row in rows:
        choices = module.model(row["tokens"], **module.model_arguments(row)).argmax(-1)
        right += ((choices == row["labels"]) & (row["labels"] != -100)).sum().item()
        total += (row["labels"] != -100).sum().item()
    assert module.validation["val/answer_accuracy"] == right / total
    assert module.validation["val/chance_level"] == 0.25
    assert logged["val/loss"] == pytest.approx(loss, rel=1e-6)


def test_several_loaders_are_measured_as_one(tmp_path):
    module = tiny_module()
    rows = [packed_row(index) for index in range(6)]
    trainer = tiny_trainer(tmp_path, max_steps=1, accelerator="cpu")
    loaders = [DataLoader(part, batch_size=None) for part in (rows[:2], rows[2:])]
    (whole,) = trainer.validate(module, DataLoader(rows, batch_size=None), verbose=False)
    results = trainer.validate(module, loaders, verbose=False)
    assert {round(value, 6) for result in results for name, value in result.items() if name == "val/loss"} == {
        round(whole["val/loss"], 6)
    }
    assert [len(part) for part in trainer.predict(module, loaders)] == [2, 4]


def test_plain_rows_need_no_packing():
    tokens = packed_row(0)["tokens"]
    module = tiny_module(config=NO_DROPOUT)
    batch = {"tokens": tokens, "labels": tokens.roll(-1)}
    steps = fit(module, [batch], accumulate=1, max_steps=1)
    assert len(steps.losses) == 1
    assert module.flops(batch) == module.model.model_flops(32, 32 * 33 // 2)


def test_flops_are_counted_for_packed_documents():
    module = tiny_module()
    row = packed_row(0)
    pairs = sum(n * (n + 1) // 2 for n in row["lengths"])
    assert module.flops(row) == module.model.model_flops(32, pairs)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    class Wide(TinyData):
        vocab_size = 32

    with pytest.raises(ValueError, match="^vocab_size=31: must be 32 or more"):
        tiny_trainer(tmp_path).fit(tiny_module(), datamodule=Wide())


@pytest.mark.parametrize(
    ("model", "given"),
    [(nn.Linear(2, 2), "Linear"), ("llama", "'llama'"), (None, "None"), (Transformer, "Transformer")],
    ids=["module", "name", "none", "class"],
)
def test_a_model_without_a_loss_is_refused(model, given):
    with pytest.raises(TypeError) as caught:
        CausalLMModule(model)
    assert str(caught.value) == (
        f"model={given}: must be a ModelConfig, its dictionary, or a module with "
        "loss(tokens, labels, *, positions, packing) -> (sum, count)"
    )


def test_a_module_and_its_data_go_to_other_processes(tmp_path):
    """As `strategy="ddp_spawn"` sends them."""
    data = PackedDataModule(RecallCorpus(n_pairs=4), seq_len=32, batch_size=1)
    module, data = pickle.loads(pickle.dumps((tiny_module(config=tiny_config(vocab_size=259)), data)))
    module.initialize_weights()
    trainer = tiny_trainer(tmp_path, max_steps=1, accumulate=1)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 1


def test_an_unknown_backend_is_refused_before_training():
    with pytest.raises(ValueError, match="^attention='flsh': must be one of auto, flash, "):
        CausalLMModule(tiny_config(), attention="flsh")


def test_compile_takes_each_block():
    module = tiny_module(compile=True)
    assert all(block._compiled_call_impl is not None for block in module.model.blocks)
    assert module.model._compiled_call_impl is None
    assert tiny_module().model.blocks[0]._compiled_call_impl is None
