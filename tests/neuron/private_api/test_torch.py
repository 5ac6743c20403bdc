"""What is used of torch without a promise: results without it are the same."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cortex.neuron.engine.loading.meta_shapes import light_shapes
from cortex.neuron.engine.parallel.peer_memory import PeerMemory
from cortex.neuron.kernels.attention import varlen
from cortex.neuron.kernels.dense.matrix import dense_product
from cortex.neuron.kernels.native.library import NativeLibrary, _threads
from cortex.neuron.layers.configs import Shard
from cortex.neuron.private_api import torch as private
from cortex.neuron.private_api.entries import Unusable
from cortex.neuron.private_api.openmp import OPENMP

from ..failed_probes import REASON, fail_probe

CPU = torch.device("cpu")
ON_GPU = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_flash_attention_takes_these_arguments() -> None:
    """Without a GPU only its shapes can be computed."""
    q, k, v = (torch.empty(12, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    assert private.flash_attention(q, k, v, offsets, 8, scale=0.1, causal=False, window=4).shape == q.shape


def test_texts_do_without_flash_attention_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    q = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(9, 2, 64), device="cuda")
    monkeypatch.setattr(private, "_check_flash", lambda *_: None)
    assert varlen._has_flash(q)  # type: ignore[arg-type]  # noqa: SLF001
    fail_probe(monkeypatch, private.FLASH_ATTENTION)
    assert not varlen._has_flash(q)  # type: ignore[arg-type]  # noqa: SLF001


@pytest.mark.parametrize("device", [CPU, ON_GPU], ids=str)
def test_activation_in_a_pass_of_its_own_is_that_of_the_epilogue(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = (part.to(device) for part in (noise(5, 32), noise(16, 32), noise(16)))
    fused = private._fused_gelu(x, weight, bias)  # noqa: SLF001
    fail_probe(monkeypatch, private.GELU_EPILOGUE)
    assert torch.allclose(private.gelu_of_product(x, weight, bias), fused, atol=1e-3)


@pytest.mark.gpu
def test_checks_of_results_pass_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    for check in (private._check_flash, private._check_gelu):  # noqa: SLF001
        check(device, torch.bfloat16)


@pytest.mark.parametrize("scale", [-1.0, float("nan")])
def test_wrong_results_of_an_operation_are_found(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = private._fused_gelu  # noqa: SLF001
    private._check_gelu(CPU, torch.float32)  # noqa: SLF001
    monkeypatch.setattr(private, "_fused_gelu", lambda *parts: real(*parts) * scale)
    with pytest.raises(Unusable, match="its results differ"):
        private._check_gelu(CPU, torch.float32)  # noqa: SLF001


def test_operation_with_other_arguments_cannot_be_used() -> None:
    with pytest.raises(Unusable, match="takes other arguments: self, mat2"):
        private._operation("aten", "mm", "left", "right")  # noqa: SLF001
    with pytest.raises(Unusable, match="no operation aten::_gone"):
        private._operation("aten", "_gone")  # noqa: SLF001


def test_dense_products_are_the_same_if_nothing_is_known_about_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = noise(3, 64).bfloat16(), noise(8, 64).bfloat16()
    expected = dense_product(x, weight)
    fail_probe(monkeypatch, private.ONEDNN_BFLOAT16)
    assert private.onednn_takes_bfloat16()
    assert torch.allclose(dense_product(x, weight), expected, atol=0.1)


def test_shapes_follow_the_rules_of_torch_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, private.SHAPE_RULES)
    left, right = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    with light_shapes():
        assert (left @ right).shape == (3, 5)


def test_rules_know_products_with_scales() -> None:
    left, right = (torch.empty(*shape, dtype=torch.float8_e4m3fn, device="meta") for shape in ((96, 32), (32, 64)))
    scales, row = (torch.empty(96, 1, device="meta"), torch.empty(1, 64, device="meta")), F.ScalingType.RowWise
    with light_shapes():
        made = F.scaled_mm(left, right, scales[0], row, scales[1], row, output_dtype=torch.float16)
    assert (made.shape, made.dtype) == ((96, 64), torch.float16)


def test_operations_that_torch_does_not_have_need_no_rule() -> None:
    with private.with_shape_rules({"_gone": lambda: torch.empty(0), "neg": lambda x: x}):
        x = torch.empty(2, device="meta")
        assert -x is x


def test_ranks_do_without_peer_memory_where_it_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, private.PEER_MEMORY)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    told: list[str] = []

    def exchange(_: str, text: str) -> list[str]:
        told.append(text)
        return [text, "('another', 'offer')"]

    assert PeerMemory.connect(Shard(0, 2), CPU, exchange) is None
    assert REASON in told[0]


@pytest.mark.parametrize("fails", [False, True])
def test_time_limit_of_nccl_is_set_where_it_has_one(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.NCCL_TIMEOUT, "applies", lambda: True)
    if fails:
        fail_probe(monkeypatch, private.NCCL_TIMEOUT)
    else:
        monkeypatch.setattr(private.NCCL_TIMEOUT, "_is_probed", True)
    options = SimpleNamespace()
    private.limit_nccl(options, timedelta(hours=1))
    assert vars(options) == ({} if fails else {"_timeout": timedelta(hours=1)})


def test_operations_in_c_run_on_one_thread_without_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = _threads()
    assert threads is not None
    assert threads.parallel
    fail_probe(monkeypatch, OPENMP)
    assert _threads() is None
    library = SimpleNamespace(run=lambda *arguments: arguments[3] is not None)
    assert NativeLibrary(library, _threads())._at is None  # type: ignore[arg-type]  # noqa: SLF001


def test_replaced_child_leaves_the_module_as_it_was() -> None:
    first, second, other = torch.nn.Linear(2, 2), torch.nn.Identity(), torch.nn.Identity()
    whole = torch.nn.Sequential(first, second)
    assert [*private.with_child(whole, "0", other).children()] == [other, second]
    assert [*whole.children()] == [first, second]
