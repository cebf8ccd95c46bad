"""StepGraph: replayed micro-batches give the losses, gradients and weights of others, bit for bit."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from flash_train.training import (
    CausalLMModule,
    CudaGraph,
    OptimizerConfig,
    StepSeed,
    StepTimes,
    build_trainer,
    step_graph,
)
from flash_train.training.callbacks.cuda_graph import captured_settings
from flash_train.training.step_graph import WARM_UP, CudaCapture, StepGraph
from tests.support.training.tiny_run import packed_row, tiny_config, tiny_module

NO_DROPOUT = tiny_config(attention_dropout=0.0, residual_dropout=0.0)


def plain_row(index, rows=1):
    """Rows of one document each: other attention than this project's kernels would read lengths on the host."""
    return {
        name: torch.cat([packed_row(index + 100 * row)[name] for row in range(rows)]) for name in ("tokens", "labels")
    }


class Rerun:
    """Captures on a CPU: a replay runs the function again, and writes to the tensors of the first run."""

    def __init__(self, parameters):
        self.parameters = [*parameters]
        self.captures = self.replays = 0

    def __call__(self, run):
        self.captures += 1
        before = [parameter.grad for parameter in self.parameters]
        values = [None if gradient is None else gradient.clone() for gradient in before]
        sums = run()
        gradients = [parameter.grad for parameter in self.parameters]
        for gradient, value in zip(gradients, values, strict=True):
            if value is not None:  # a capture computes nothing
                gradient.copy_(value)

        def replay():
            self.replays += 1
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            for x, again in zip(sums, run(), strict=True):
                x.copy_(again)
            for parameter, gradient, given in zip(self.parameters, gradients, before, strict=True):
                if given is None and gradient is not None:  # a frozen weight has none
                    gradient.copy_(parameter.grad)
                    parameter.grad = None

        return replay, sums


class Replaying(pl.Callback):
    """Gives a module on a CPU a graph."""

    def __init__(self, **options):
        self.options = options

    def on_train_start(self, trainer, pl_module):
        parameters = [*pl_module.parameters()]
        self.capture = Rerun(parameters)
        settings = partial(captured_settings, trainer, pl_module)
        options = {"required": False, "capture": self.capture, "settings": settings, **self.options}
        pl_module.step_graph = StepGraph(pl_module.loss_with_sums, parameters, **options)


class Results(pl.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        last = pl_module.last_step
        if last is not None and last.step == len(self.steps) + 1:
            self.steps.append((last.loss.item(), last.gradient_norm.item()))


def fit(batches, *callbacks, accumulate=1, max_steps=6, module=None, **options):
    results, module = Results(), module or tiny_module(config=NO_DROPOUT)
    options = {"accelerator": "cpu", **options}
    trainer = pl.Trainer(
        max_steps=max_steps, accumulate_grad_batches=accumulate, callbacks=[results, StepSeed(3), *callbacks],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return results.steps, [parameter.detach().cpu() for parameter in module.parameters()]


def assert_same(ours, theirs):
    assert ours[0] == theirs[0] and len(ours[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replays_train_as_a_run_without_graphs(accumulate):
    batches = [plain_row(index) for index in range(6 * accumulate)]
    replaying = Replaying()
    assert_same(fit(batches, replaying, accumulate=accumulate), fit(batches, accumulate=accumulate))
    # The micro-batches of the step in which the warm-up ends run without a graph
    steps_without = -(-WARM_UP // accumulate)
    assert replaying.capture.replays == (6 - steps_without) * accumulate
    assert replaying.capture.captures == (1 if accumulate == 1 else 2)


def test_batches_of_another_shape_run_without_a_graph():
    long = plain_row(50, rows=2)
    for accumulate in (1, 2):
        batches = [plain_row(index) if index % 3 else long for index in range(1, 6 * accumulate + 1)]
        assert_same(fit(batches, Replaying(), accumulate=accumulate), fit(batches, accumulate=accumulate))


def one_document_row(index):
    row = packed_row(index)
    n = row["tokens"].shape[1]
    return {
        **row,
        "positions": torch.arange(n)[None],
        "cu_seqlens": torch.tensor([0] + [n] * 5, dtype=torch.int32),
        "lengths": (n,),
    }


def test_a_graph_of_attention_that_reads_lengths_serves_the_same_lengths():
    same = [one_document_row(index) for index in range(8)]
    replaying = Replaying(by_lengths=True)
    assert_same(fit(same, replaying, max_steps=8), fit(same, max_steps=8))
    assert replaying.capture.replays == 8 - WARM_UP

    mixed = [packed_row(index) if index in (4, 6) else row for index, row in enumerate(same)]
    assert_same(fit(mixed, replaying, max_steps=8), fit(mixed, max_steps=8))
    assert replaying.capture.replays == 8 - WARM_UP - 2


def test_a_capture_that_fails(caplog):
    batches = [plain_row(index) for index in range(12)]

    class Failing(Replaying):
        def on_train_start(self, trainer, pl_module):
            def capture(run):
                run()
                raise RuntimeError("out of graphs\nand more")

            parameters = [*pl_module.parameters()]
            pl_module.step_graph = StepGraph(
                pl_module.loss_with_sums, parameters, required=self.required, capture=capture
            )

    failing = Failing()
    failing.required = False
    assert_same(fit(batches, failing, accumulate=2), fit(batches, accumulate=2))
    assert "trainer.cuda_graph=auto: runs without a CUDA graph (out of graphs)" in caplog.text
    failing.required = True
    with pytest.raises(RuntimeError, match="out of graphs"):
        fit(batches, failing)


def test_what_prevents_a_graph_is_named(tmp_path):
    batches = [plain_row(0)]
    with pytest.raises(ValueError, match="cuda_graph=true: there is no NVIDIA GPU; allowed: auto or false"):
        fit(batches, CudaGraph(True))
    with pytest.raises(ValueError, match="cuda_graph='yes': must be auto, true or false"):
        CudaGraph("yes")
    fit(batches, CudaGraph())


class OwnStep(CausalLMModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.model.norm.weight.pow(2).sum()


class OwnMetric(CausalLMModule):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "callbacks", "says"),
    [
        (OwnStep, (), "OwnStep has a training_step of its own, which a replay would leave out"),
        (CausalLMModule, (GradientAccumulationScheduler({0: 1, 1: 2}),), "GradientAccumulationScheduler changes the"),
        (OwnMetric, (), "attention=sdpa needs the lengths"),
    ],
)
def test_what_a_replay_would_leave_out(kind, callbacks, says):
    """These had wrong gradients from the third micro-batch on."""
    strategy = SingleDeviceStrategy(torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, callbacks=[*callbacks], precision_plugin=None)
    module = kind(NO_DROPOUT, OptimizerConfig(), attention="sdpa")
    assert CudaGraph().obstacle(trainer, module, 32).startswith(says)


@pytest.mark.parametrize(
    ("attention", "dropout", "says"),
    [
        ("sdpa", 0.1, None), ("standard", 0.1, None), ("chunked", 0.0, None),
        ("chunked", 0.1, "attention=chunked with dropout reads the generator's state within a step"),
    ],
)  # fmt: skip
def test_rows_of_one_document_are_captured_with_any_attention(attention, dropout, says):
    strategy = SingleDeviceStrategy(torch.device("cuda", 0))
    trainer = SimpleNamespace(strategy=strategy, callbacks=[], precision_plugin=None)
    module = CausalLMModule(tiny_config(attention_dropout=dropout), OptimizerConfig(), attention=attention)
    graph = CudaGraph()
    assert graph.obstacle(trainer, module, 32, one_document_rows=True) == says
    assert graph.obstacle(trainer, module, 32).startswith(f"attention={attention} needs the lengths of a batch's")


def hook_weight(module):
    module.model.norm.weight.register_hook(lambda gradient: None)


def hook_sum(module):
    module.model.norm.weight.register_post_accumulate_grad_hook(lambda weight: None)


def hook_module(module):
    module.model.blocks[1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("add", "says"),
    [(hook_weight, "model.norm.weight"), (hook_sum, "model.norm.weight"), (hook_module, "model.blocks.1")],
)
def test_hooks_prevent_a_graph(add, says):
    trainer = SimpleNamespace(
        strategy=SingleDeviceStrategy(torch.device("cuda", 0)), callbacks=[], precision_plugin=None
    )
    module = CausalLMModule(NO_DROPOUT, OptimizerConfig(), attention="sdpa")
    assert CudaGraph().obstacle(trainer, module, 32).startswith("attention=sdpa needs the lengths")
    add(module)
    assert CudaGraph().obstacle(trainer, module, 32) == f"{says} has hooks, which a replay would not call"


class Unfreezing(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        pl_module.model.embedding.weight.requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.model.embedding.weight.requires_grad_(trainer.global_step >= 4)


class Alternating(Unfreezing):
    """Freezes another weight in its place, as methods do that train a few layers at a time."""

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        super().on_train_batch_end(trainer, pl_module, *arguments)
        pl_module.model.norm.weight.requires_grad_(trainer.global_step < 4)


class Accumulating(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.accumulate_grad_batches = 1 if trainer.global_step < 4 else 2


class Evaluating(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.model.blocks[0].train(trainer.global_step < 4)


class Replacing(pl.Callback):
    """Gives a weight other memory, as a swap with its moving average may do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            weight = pl_module.model.norm.weight
            weight.data = weight.data.clone()


FROZEN = "weights were frozen or unfrozen since training began"
CHANGED = "accumulate_grad_batches or the mode of a module has changed since the capture"
MOVED = "a weight has got other memory since the capture"


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Unfreezing, FROZEN), (Alternating, FROZEN), (Accumulating, CHANGED), (Evaluating, CHANGED), (Replacing, MOVED)],
)
def test_what_changes_in_training_ends_the_graph(caplog, kind, says):
    batches = [plain_row(index) for index in range(12)]
    replaying = Replaying()
    found = fit(batches, kind(), replaying, max_steps=8)
    assert_same(found, fit(batches, kind(), max_steps=8))
    assert says in caplog.text
    assert replaying.capture.replays == 4 - WARM_UP


@pytest.fixture
def captures(monkeypatch):
    """The options of all captures, which capture nothing; a stream is the number of its device."""
    given = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: (0, 1), replay=None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: given.append(options) or nullcontext())
    monkeypatch.setattr(step_graph, "_capture_stream", lambda device: device)
    return given


def test_other_threads_may_use_cuda_during_a_capture(captures):
    """A data loader's thread pins the next batch, which ended the capture, and the run with it."""
    CudaCapture()(lambda: None)
    assert captures[0]["capture_error_mode"] == "thread_local"


def test_a_later_fit_may_capture_on_another_device(captures, monkeypatch):
    """PyTorch's own stream for captures is on the device of the first one."""
    CudaCapture()(lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    CudaCapture()(lambda: None)
    assert [options["stream"] for options in captures] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp32"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_graphs_train_as_a_run_without(tmp_path, precision, accumulate, dropout):
    _compare_on_gpu(tmp_path, precision=precision, accumulate=accumulate, dropout=dropout)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["selective", "checkpoint"])
def test_graphs_with_recomputation(tmp_path, memory):
    _compare_on_gpu(tmp_path, precision="bf16-true", accumulate=2, dropout=0.0, memory=memory)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "standard", "chunked"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_graphs_of_attention_that_reads_lengths(tmp_path, attention, dropout):
    if attention == "chunked" and dropout:
        pytest.skip("chunked attention with dropout cannot be captured")
    _compare_on_gpu(tmp_path, precision="bf16-true", accumulate=2, dropout=dropout, attention=attention)


class RowsOfATest(pl.LightningDataModule):
    def __init__(self, rows, packing):
        super().__init__()
        self.rows, self.packing = rows, packing

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=None)


def _compare_on_gpu(tmp_path, *, precision, accumulate, dropout, memory="none", attention="triton"):
    config = tiny_config(head_dim=64, width=128, attention_dropout=dropout, residual_dropout=dropout, vocab_size=31)
    row = packed_row if attention == "triton" else one_document_row
    packing = "best_fit" if attention == "triton" else "concat"
    data = RowsOfATest([row(index) for index in range(8 * accumulate)], packing)
    found, captured = [], []
    for mode in (True, False):
        torch.manual_seed(0)
        module = CausalLMModule(config, OptimizerConfig(lr=1e-2, warmup_steps=2), attention=attention, memory=memory)
        results = Results()
        watch = [Watch(captured)] if mode else []
        trainer = build_trainer(
            run_dir=tmp_path / str(mode), max_steps=8, accumulate=accumulate, precision=precision, accelerator="cuda",
            checkpoints=False, progress=False, cuda_graph=mode, limit_val_batches=0, callbacks=[results, *watch],
        )  # fmt: skip
        trainer.fit(module, data)
        found.append((results.steps, [parameter.detach().cpu() for parameter in module.parameters()]))
    assert_same(*found)
    assert captured[-1] == (1 if accumulate == 1 else 2)


class Watch(pl.Callback):
    """Notes how many graphs there were before the end of training."""

    def __init__(self, found):
        self.found = found

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(len(pl_module.step_graph._replays))


@pytest.mark.gpu
def test_what_prevents_a_graph_on_a_gpu(tmp_path):
    for options, words in (
        ({"attention": "sdpa"}, "attention=sdpa needs the lengths"),
        ({"attention": "triton", "memory": "checkpoint"}, "memory=checkpoint with dropout"),
        ({"attention": "triton", "compile": True}, "compiled layers"),
    ):
        trainer = build_trainer(
            run_dir=tmp_path, max_steps=1, accelerator="cuda", checkpoints=False, progress=False, cuda_graph=True,
            limit_val_batches=0,
        )  # fmt: skip
        with pytest.raises(ValueError, match=words):
            trainer.fit(tiny_module(**options), DataLoader([packed_row(0)], batch_size=None))
    trainer = build_trainer(
        run_dir=tmp_path, max_steps=1, accelerator="cuda", checkpoints=False, progress=False, cuda_graph=True,
        limit_val_batches=0, callbacks=[StepTimes()],
    )  # fmt: skip
    with pytest.raises(ValueError, match="step_times"):
        trainer.fit(tiny_module(attention="triton"), DataLoader([packed_row(0)], batch_size=None))
