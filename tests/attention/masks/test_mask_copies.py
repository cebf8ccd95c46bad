"""Copies of masks, specs, and modules that have them: deep copies, pickles, files, and other processes."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch

from flash_train.attention import (
    AttentionSpec,
    BlockSparse,
    Causal,
    Document,
    Full,
    MaskFunction,
    Packing,
    RngState,
    Tree,
    Window,
    attention,
)
from flash_train.attention.packing import Entry

pytest.importorskip("triton", reason="Triton exists for Linux only")

from tests.support.attention.cases.rules import budget, budget_twin, parity, parity_twin

N = 9
FUNCTION = MaskFunction(budget, budget_twin, (torch.arange(N), torch.tensor([3, N])))
MASKS = {
    "full": Full(),
    "window": Window(3, 1),
    "blocks": BlockSparse(torch.eye(2, dtype=torch.bool), 8),
    "document": Causal() & Document((torch.arange(N) // 4).int()),
    "tree": Tree([-1, 0, 0]),
    "function": FUNCTION,
    "function-without-tensors": MaskFunction(parity, parity_twin),
    "function-with-others": Window(5, 2) & FUNCTION & Document((torch.arange(N) // 4).int()),
}


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved,
}


class Layer(torch.nn.Module):
    """A user's module with a spec as attribute."""

    def __init__(self, spec):
        super().__init__()
        self.spec, self.project = spec, torch.nn.Linear(8, 8)

    def forward(self, x):
        return attention(self.project(x), x, x, self.spec, backend="reference")


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", MASKS)
def test_a_copied_module_computes_the_same(name, way):
    torch.manual_seed(0)
    layer, x = Layer(AttentionSpec(MASKS[name], scale=0.3)), torch.randn(1, N, 2, 8)
    copied = COPIES[way](layer)
    assert torch.equal(copied(x), layer(x))
    assert copied.spec.mask.lower().terms == MASKS[name].lower().terms


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copied_function_has_its_own_tensors_and_the_same_kernel(way):
    copied = COPIES[way](FUNCTION)
    assert copied.kernel is FUNCTION.kernel and copied.twin is FUNCTION.twin and copied.name == FUNCTION.name
    assert torch.equal(copied.tensors[0], FUNCTION.tensors[0])
    assert copied.tensors[0].data_ptr() != FUNCTION.tensors[0].data_ptr()


def test_a_shared_tensor_is_copied_once():
    tensor = torch.arange(N)
    mask, other = copy.deepcopy((MaskFunction(parity, parity_twin, (tensor,)), tensor))
    assert mask.tensors[0] is other


def test_an_averaged_model_has_a_copy():
    layer = Layer(AttentionSpec(FUNCTION))
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    averaged.update_parameters(layer)
    assert averaged.module.spec.mask.kernel is budget


def test_packing_and_dropout_state_can_be_copied():
    cu = torch.tensor([0, 4, N], dtype=torch.int32)
    for way in COPIES.values():
        packing, rng = way((Packing(cu, cu, lengths=(4, 5)), RngState(torch.tensor(5), 6)))
        assert torch.equal(packing.cu_seqlens_q, cu) and packing.lengths == (4, 5)
        assert rng.as_tensor(torch.device("cpu")).tolist() == [5, 6]


def rule_of(mask, queue):
    """Runs in another process."""
    queue.put(mask.dense(Entry.of_lengths(N, N), 2).tolist())


def test_a_mask_is_sent_to_a_spawned_process():
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    mask = MASKS["function-with-others"]
    process = context.Process(target=rule_of, args=(mask, queue))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert queue.get() == mask.dense(Entry.of_lengths(N, N), 2).tolist()


def closure():
    def twin(entry, head, q, k):
        return q >= k

    return twin


NAMELESS = [
    (MaskFunction(parity, lambda entry, head, q, k: q >= k), r"MaskFunction\(twin=tests.*<lambda>\): must be a func"),
    (MaskFunction(parity, closure()), r"MaskFunction\(twin=tests.*closure.<locals>.twin\): must be a function at"),
    (MaskFunction(closure(), parity_twin), r"MaskFunction\(kernel=tests.*closure.<locals>.twin\): must be a function"),
]


@pytest.mark.parametrize(("mask", "message"), NAMELESS, ids=["lambda", "closure", "kernel"])
def test_lambdas_and_closures_are_copied_but_not_pickled(mask, message):
    for way in (copy.copy, copy.deepcopy):
        copied = way(AttentionSpec(Causal() & mask)).mask.terms[1]
        assert copied.twin is mask.twin and copied.kernel is mask.kernel
    with pytest.raises(pickle.PicklingError, match=message):
        pickle.dumps(AttentionSpec(Causal() & mask))
