"""Which kernels are compiled ahead: those that the steps of a model launch on the `meta` device. None is compiled."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cortex.cli import warmup as command
from cortex.neuron.engine.errors import LoadCancelled, LoadError
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.loading import kernel_pass, warmup
from cortex.neuron.engine.loading.kernel_pass import KernelPass, ModelToCompile
from cortex.neuron.engine.loading.meta_shapes import light_shapes
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels import compilation
from cortex.neuron.kernels.device_properties import CARDS
from cortex.neuron.kernels.jit import INTERPRETED, TRITON
from cortex.neuron.kernels.quantised.layout import INT4, Q4, OrderedLayout
from cortex.neuron.layers.configs import WHOLE
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.private_api.torch import with_shape_rules
from cortex.neuron.private_api.triton import OfflineDriver

from ....waiting import WAIT_S, wait_until
from ...tiny_models import tiny_delta, tiny_sizes

driver = pytest.importorskip("triton.runtime").driver
pytestmark = pytest.mark.skipif(not TRITON or INTERPRETED, reason="needs Triton's compiler")

SIZES = {
    **tiny_sizes(vocab_size=64, hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=3),
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
DENSE: dict[str, Any] = {"model_type": "qwen3", **SIZES}
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    **SIZES,
    **tiny_delta(),
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
FACTS = CARDS["sm_90"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the kernels that would be compiled."""
    names: list[str] = []
    monkeypatch.setattr(compilation, "timed", lambda compile_: names.append(compile_.args[0].__name__))
    monkeypatch.setattr(kernel_pass, "cache_folder", lambda: tmp_path / "triton")
    monkeypatch.setattr(driver, "_active", OfflineDriver(FACTS.capability))
    monkeypatch.setattr(warmup, "use_offline", lambda _: None)
    return names


def passed(config: dict[str, Any], **packing: Any) -> ModelToCompile:
    return ModelToCompile(read_architecture(config), packing, torch.bfloat16, torch.bfloat16, WHOLE, 16, 128)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DENSE, {"_decode_kernel", "_prefill_kernel", "_rotate_kernel", "_small_batch_kernel"}),
        (HYBRID, {"_decode_kernel", "_prefill_kernel", "_carry_kernel", "_conv_kernel", "_step_kernel"}),
    ],
)
def test_pass_finds_the_kernels_of_prompts_and_single_tokens_once(
    config: dict[str, Any], expected: set[str], compiled: list[str]
) -> None:
    first = KernelPass(passed(config), FACTS)
    assert not first.is_cached
    first.start()
    assert first.wait() == len(compiled)
    assert expected <= set(compiled)
    assert len(compiled) < 60  # and not one for each layer and size
    again = KernelPass(passed(config), FACTS)
    assert again.is_cached
    assert again.wait() == 0


def test_wait_for_the_first_kernels_polls_and_can_be_cancelled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow(compile_: Any) -> None:
        begun.set()
        released.wait()
        compiled.append(compile_.args[0].__name__)

    monkeypatch.setattr(compilation, "timed", slow)
    first = KernelPass(passed(DENSE), FACTS)
    first.start()

    def cancelled() -> None:
        if begun.is_set():
            raise LoadCancelled

    with pytest.raises(LoadCancelled):
        first.ready(cancelled)
    assert not compiled
    first.ready(released.set)
    assert compiled
    first.wait()


def test_kernels_of_the_first_response_have_all_cores(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not even begun before."""
    compilers: list[compilation.KernelCompiler] = []
    num_first: list[int] = []
    num_compiled: list[int] = []
    prepare_first, prepare = Runner.prepare_first, Runner.prepare

    def compiler() -> compilation.KernelCompiler:
        compilers.append(compilation.KernelCompiler())
        return compilers[-1]

    def first(runner: Runner) -> None:
        prepare_first(runner)
        num_first.append(compilers[0].num_kernels)

    def other(runner: Runner) -> bool:
        if num_first:
            num_compiled.append(len(compiled))
        return prepare(runner)

    monkeypatch.setattr(kernel_pass, "KernelCompiler", compiler)
    monkeypatch.setattr(Runner, "prepare_first", first)
    monkeypatch.setattr(Runner, "prepare", other)
    kernels = KernelPass(passed(DENSE), FACTS)
    kernels.start()
    assert kernels.wait() > num_first[0] > 0
    assert min(num_compiled) >= num_first[0]


def test_first_response_does_not_wait_for_other_kernels(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    prepared: list[int] = []
    prepare_first, timed = Runner.prepare_first, compilation.timed

    def first(runner: Runner) -> None:
        prepare_first(runner)
        prepared.append(1)

    def gated(compile_: Callable[[], object]) -> float:
        if kernels._is_collected.is_set() and len(compiled) >= kernels._num_first:  # noqa: SLF001 - one of the others
            may_go_on.wait(WAIT_S)
        return timed(compile_)

    monkeypatch.setattr(Runner, "prepare_first", first)
    monkeypatch.setattr(compilation, "timed", gated)
    kernels = KernelPass(passed(DENSE), FACTS)
    kernels.start()
    wait_until(lambda: prepared and kernels._compiler.num_kernels > kernels._num_first)  # noqa: SLF001 - others have begun
    kernels.ready(lambda: None)
    assert not may_go_on.is_set()
    may_go_on.set()
    assert kernels.wait() > kernels._num_first > 0  # noqa: SLF001


def test_kernels_of_prompts_beyond_the_graphs_are_compiled_too(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute = Runner.compute_prompt

    def counted(runner: Runner, num_tokens: int) -> None:
        before = compiler().num_kernels
        compute(runner, num_tokens)
        computed.append(compiler().num_kernels - before)

    def compiler() -> compilation.KernelCompiler:
        return kernels._compiler  # noqa: SLF001

    monkeypatch.setattr(Runner, "compute_prompt", counted)
    kernels = KernelPass(passed(DENSE), FACTS)
    kernels.start()
    kernels.wait()
    assert computed[0] > 0, "attention takes other tiles there"


def test_failed_pass_is_a_warning_and_counted(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Runner) -> None:
        raise RuntimeError("the compiler has a bug")

    monkeypatch.setattr(Runner, "prepare_first", fails)
    kernels = KernelPass(passed(DENSE), FACTS)
    with caplog.at_level(logging.WARNING):
        kernels.start()
        kernels.ready(lambda: None)
        with pytest.raises(RuntimeError, match="a bug"):
            kernels.wait()
    (record,) = [each for each in caplog.records if each.name == kernel_pass.__name__]
    assert (record.levelname, kernels.has_failed, compiled) == ("WARNING", True, [])
    assert not KernelPass(passed(DENSE), FACTS).is_cached


def test_pass_that_is_closed_while_it_collects_is_no_failure(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = KernelPass(passed(DENSE), FACTS)
    prepare_first = Runner.prepare_first

    def closed_before(runner: Runner) -> None:
        begun.close()
        prepare_first(runner)

    monkeypatch.setattr(Runner, "prepare_first", closed_before)
    begun.start()
    begun.wait()
    assert not compiled
    assert not begun.has_failed
    assert "failed" not in caplog.text


def test_launcher_of_a_kernel_is_built_with_it_where_there_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []

    class Driver(OfflineDriver):
        def launcher_cls(self, *described: str) -> None:
            built.append((described[0], described[1]))

    monkeypatch.setattr(driver, "_active", Driver(FACTS.capability))
    compilation.timed(lambda: SimpleNamespace(src="source", metadata="metadata"))
    assert built == [("source", "metadata")]
    monkeypatch.setattr(driver, "_active", OfflineDriver(FACTS.capability))
    compilation.timed(lambda: SimpleNamespace(src="source", metadata="metadata"))
    assert len(built) == 1


def test_other_layouts_are_another_pass() -> None:
    dense, packed = passed(DENSE), passed(DENSE, **{"model.layers.0.mlp.down_proj.weight": Q4})
    assert len({dense.digest(FACTS), packed.digest(FACTS), dense.digest(CARDS["sm_80"])}) == 3


def test_order_of_columns_in_each_layer_takes_no_kernels_of_its_own(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    prepare_first = Runner.prepare_first

    def first(runner: Runner) -> None:
        kept.append(len(runner.model.layers))
        prepare_first(runner)

    monkeypatch.setattr(Runner, "prepare_first", first)
    matrices = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    layers = range(SIZES["num_hidden_layers"])
    packing: dict[str, Any] = {
        f"model.layers.{layer}.{name}.weight": OrderedLayout(INT4, f"{layer} {name[-6]}")
        for layer in layers
        for name in (*matrices, "mlp.up_proj")
    }
    packing |= {f"model.layers.{layer}.mlp.down_proj.weight": INT4 for layer in layers}
    ordered = KernelPass(passed(DENSE, **packing), FACTS)
    ordered.start()
    ordered.wait()
    assert kept == [1]
    assert "_in_order_kernel" in compiled


def test_warmup_needs_the_config_alone(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    num_kernels = warmup.warm_kernels(tmp_path, LoadSpec("", quant="q4"), FACTS, 1)
    assert num_kernels == len(compiled) > 10
    assert "_values_kernel" in compiled  # which quantises weights as they are read


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "neither weights nor a config.json"),
        ({**DENSE, "quantization_config": {"quant_method": "fp8"}}, "the formats of its tensors are in its weights"),
        ({"model_type": "nothing-we-know"}, "nothing-we-know"),
        (5, "neither weights nor a config.json"),
    ],
)
def test_warmup_says_what_is_missing(config: dict[str, Any] | int | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=message):
        warmup.warm_kernels(tmp_path, LoadSpec(""), FACTS, 1)


def test_command_offers_the_cards_that_are_known() -> None:
    assert tuple(CARDS) == command.CARD_NAMES


def test_shapes_are_those_of_computed_results() -> None:
    def made(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        left, right = torch.ones(3, 4, device=device), torch.ones(4, 5, device=device)
        ids = torch.ones(2, dtype=torch.int64, device=device)
        found = [
            left @ right,
            torch.addmm(torch.ones(5, device=device), left, right),
            torch.bmm(left[None], right[None]),
            left + 1,
            ids + 1,
            ids / 2,
            left.index_select(0, ids),
            torch.nn.functional.embedding(ids, left),
            torch.cat((left, left), 1),
            torch.arange(1, 7, 2, device=device),
            torch.arange(0, 1, 0.1, device=device),
            torch.arange(2.5, device=device),
            torch.cat((ids, left[0])),
            torch.zeros(2, 3, device=device),
            (left * ids[0]).cos(),
        ]
        return [(each.shape, each.dtype) for each in found]

    with torch.inference_mode(), light_shapes():
        assert made("meta") == made("cpu")


def test_other_threads_keep_the_rules_of_torch() -> None:
    x = torch.empty(2, device="meta")
    with ThreadPoolExecutor(1) as other, with_shape_rules({"clone": lambda x, **_: x}):
        assert x.clone() is x
        assert other.submit(x.clone).result() is not x
    assert x.clone() is not x
