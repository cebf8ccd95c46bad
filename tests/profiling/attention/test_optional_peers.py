"""Implementations of attention that come with packages of their own. What computes needs a GPU and the package."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from flash_train.attention import attention
from flash_train.profiling.attention import peers
from flash_train.profiling.attention.cases import Case
from flash_train.profiling.attention.comparison import ALLOWED_ERROR, check
from flash_train.profiling.attention.peers import build, has_module, implementations

DENSE = Case(128, 4, 2, 512, True)
PACKED = Case(128, 4, 2, 0, True, lengths=(300, 20, 700))


def test_missing_packages_are_left_out(monkeypatch):
    monkeypatch.setattr(peers, "has_module", lambda name: False)
    assert not {"fa4", "flex_fa4", "cudnn_packed"} & {*implementations(DENSE), *implementations(PACKED)}
    monkeypatch.setattr(peers, "has_module", lambda name: True)
    assert implementations(DENSE)[-5:] == ("fa2", "cudnn", "fa4", "flex", "flex_fa4")
    assert implementations(PACKED)[-5:] == ("fa4", "varlen_attn", "cudnn_packed", "flex", "flex_fa4")
    assert implementations(replace(DENSE, density=0.5))[-2:] == ("flex", "flex_fa4")


def test_a_module_of_a_missing_package_is_missing():
    assert has_module("torch.nn") and not has_module("torch.nothing") and not has_module("nothing.at_all")


@pytest.mark.parametrize("name", ["fa4", "varlen_attn", "cudnn_packed", "flex", "flex_fa4"])
def test_peers_without_dropout_say_so(name):
    with pytest.raises(ValueError, match=f"{name} has no dropout"):
        build(name, replace(PACKED, dropout=0.1), "cpu")


@pytest.fixture
def flash_attention_4(monkeypatch):
    """Functions with the signatures of FlashAttention-4, computed by PyTorch."""
    cute = ModuleType("flash_attn.cute")

    def flash_attn_func(q, k, v, causal=False):
        return attention(q, k, v, replace(DENSE, causal=causal).spec("cpu"), backend="reference")

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == 700
        packing = PACKED.packing("cpu")
        assert torch.equal(packing.cu_seqlens_q, cu_seqlens_q)
        return attention(q, k, v, PACKED.spec("cpu"), packing=packing, backend="reference"), None

    cute.flash_attn_func, cute.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_flash_attention_4_is_called_as_its_users_do(case, flash_attention_4, monkeypatch):
    monkeypatch.setattr(Case, "batch", property(lambda case: 1))
    tensors = case.inputs("cpu", torch.float32)
    assert check("fa4", build("fa4", case, "cpu"), case, tensors) < 1e-5


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_cudnns_graph_is_valid(direction):
    """The front end checks shapes, strides and what each operation needs, without a GPU."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    from flash_train.profiling.attention.packed_cudnn import PackedCudnn

    graph = PackedCudnn(PACKED, "cpu").graph(direction)
    graph.graph.validate()
    wanted = {"q", "k", "v", "out", "statistics"}
    assert set(graph.tensors) == (wanted if direction == "forward" else wanted | {"dout", "dq", "dk", "dv"})
    assert graph.tensors["q"].get_dim() == [3, 4, 700, 128] and graph.tensors["k"].get_stride() == [179200, 128, 256, 1]
    offsets = [data.flatten().tolist() for data in graph._fixed.values() if data.dtype == torch.int64]
    assert offsets == [[0, 300 * 512, 320 * 512, 1020 * 512], [0, 300 * 256, 320 * 256, 1020 * 256]]


@pytest.mark.gpu
@pytest.mark.parametrize("name, module", peers.MODULES.items())
@pytest.mark.parametrize("case", [DENSE, PACKED, replace(PACKED, causal=False)], ids=["dense", "packed", "packed-full"])
def test_they_compute_the_case(name, module, case):
    if name == "cudnn_packed" and not case.lengths:
        pytest.skip("cudnn_packed takes packed rows alone")
    if not has_module(module):
        pytest.skip(f"{module} is not installed")
    assert check(name, build(name, case, "cuda"), case, case.inputs("cuda")) < ALLOWED_ERROR
