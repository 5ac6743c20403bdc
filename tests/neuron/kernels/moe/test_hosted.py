"""Experts in host memory give what they give on the device."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe import host_team
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.host_exchange import ExchangeRule, exchange_of
from cortex.neuron.kernels.moe.host_layers import MAX_ROWS, HostBlock, HostExperts
from cortex.neuron.kernels.moe.host_memory import HostMatrix, processors_of_one_node
from cortex.neuron.kernels.moe.host_team import HostRates, HostTeam
from cortex.neuron.kernels.moe.hosted import hand_over, hosted_block, hosted_mixture
from cortex.neuron.kernels.moe.mixture import mixture_reference
from cortex.neuron.kernels.moe.routing import choose_rows_reference
from cortex.neuron.kernels.native.library import native_library
from cortex.neuron.kernels.quantised.layout import FP4, INT4, INT8, IQ4, Q2, Q3, Q4, Q5, Q6, Q8, Layout
from cortex.neuron.kernels.storages import empty_device_matrix

from ....waiting import wait_until

_CPU = torch.device("cpu")
_EXPERTS, _HOSTED, _TOP_K = 6, 4, 2
_LAYOUTS: dict[str, DeviceLayout | torch.dtype] = {
    "Q2": Q2, "Q3": Q3, "Q4": Q4, "Q5": Q5, "Q6": Q6, "Q8": Q8, "IQ4": IQ4, "FP4": FP4, "INT4": INT4, "INT8": INT8,
    "FP8 blocks": FLOAT8_BLOCKS, "FP8 rows": FLOAT8_ROWS, "bfloat16": torch.bfloat16, "float32": torch.float32,
}  # fmt: skip
_BLOCK_LAYOUTS = ("Q2", "Q3", "Q4", "Q5", "Q6", "Q8", "FP4", "FP8 rows", "float32")
"""Those whose products take rows in float32."""


def _allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _matrix(kind: DeviceLayout | torch.dtype, outputs: int, inputs: int, device: torch.device = _CPU) -> ExpertMatrix:
    if isinstance(kind, torch.dtype):
        return DenseMatrix(torch.empty(outputs, inputs, dtype=kind, device=device))
    return empty_device_matrix(kind, outputs, inputs, device)


def _matrices(
    kind: DeviceLayout | torch.dtype, rows: int, inputs: int
) -> tuple[ExpertMatrix, ExpertMatrix, HostMatrix]:
    """All experts with `rows` rows each, those on the device, and the others."""
    held = (_EXPERTS - _HOSTED) * rows
    whole, some = _matrix(kind, _EXPERTS * rows, inputs), _matrix(kind, held, inputs)

    def make(outputs: int, device: torch.device) -> ExpertMatrix:
        return _matrix(kind, outputs, inputs, device)

    hosted = HostMatrix(make, rows, _HOSTED + 1, inputs, _CPU, _allocate)
    values = torch.randn(_EXPERTS * rows, inputs) / inputs**0.5
    parts = ((whole, slice(None)), (some, slice(held)), (hosted, slice(held, None)))
    if not isinstance(kind, Layout) or not kind.codebook:
        for matrix, span in parts:
            matrix.put_values(0, values[span])
        return whole, some, hosted
    assert kind.zero is not None
    codes = (torch.tensor(kind.codebook)[torch.randint(0, 16, values.shape)] + kind.zero).to(torch.uint8)
    scales = torch.rand(len(values), inputs // 32) / 100
    for matrix, span in parts:
        matrix.put_codes(0, codes[span], scales[span], -kind.zero * scales[span])
    return whole, some, hosted


def _hosted(kind: DeviceLayout | torch.dtype, values: Tensor) -> HostMatrix:
    """One place, with the values as a matrix of the device has them."""
    inputs = values.shape[1]
    matrix = HostMatrix(
        lambda outputs, device: _matrix(kind, outputs, inputs, device), len(values), 1, inputs, _CPU, _allocate
    )
    for own, part in zip(matrix.tensors, _filled(kind, values).tensors, strict=True):
        own.copy_(part)
    return matrix


def _filled(kind: DeviceLayout | torch.dtype, values: Tensor) -> ExpertMatrix:
    """Codebooks have no rounding of values: theirs are random."""
    matrix = _matrix(kind, *values.shape)
    if isinstance(kind, Layout) and kind.codebook:
        assert kind.zero is not None
        torch.manual_seed(len(values))
        codes = (torch.tensor(kind.codebook)[torch.randint(0, 16, values.shape)] + kind.zero).to(torch.uint8)
        scales = torch.rand(len(values), values.shape[1] // 32) / 100
        matrix.put_codes(0, codes, scales, -kind.zero * scales)
    else:
        matrix.put_values(0, values)
    return matrix


class _Layer:
    """The same experts whole, and divided."""

    def __init__(self, kind: DeviceLayout | torch.dtype, hidden: int, inner: int, *, gated: bool, biased: bool) -> None:
        torch.manual_seed(1)
        self._kind = kind
        rows = (1 + gated) * inner
        self.team = HostTeam(_CPU, torch.float32, _allocate, buffer_experts=3, processors=processors_of_one_node())
        (gate_up, held_gate_up, hosted_gate_up) = _matrices(kind, rows, hidden)
        (down, held_down, hosted_down) = _matrices(kind, hidden, inner)
        held = (held_gate_up, held_down)
        self.host = HostExperts(
            *(hosted_gate_up, hosted_down, held, torch.float32),
            stream_places=3,
            num_experts=_EXPERTS,
            slots=_TOP_K,
            gated=gated,
            activation="silu",
        )
        self.team.layers.append(self.host)
        if biased:
            self.host.biases = (torch.randn(_EXPERTS * rows), torch.randn(_EXPERTS * hidden))
        biases = self.host.biases
        router = torch.randn(_EXPERTS, hidden)
        self.whole = Experts(
            router, gate_up, down, _TOP_K, True, gated=gated, gate_up_bias=biases[0], down_bias=biases[1]
        )
        self.divided = replace(
            self.whole,
            gate_up=held_gate_up,
            down=held_down,
            slot_of=self.host.slot_of,
            expert_on=self.host.experts_on,
        )
        self.norm = torch.rand(hidden) + 0.5
        self.team.prepare()

    def empty(self, matrix: ExpertMatrix, rows: int) -> ExpertMatrix:
        return _matrix(self._kind, rows, matrix.inputs)

    def empty_hosted(self, matrix: ExpertMatrix, rows: int, places: int) -> HostMatrix:
        def make(outputs: int, device: torch.device) -> ExpertMatrix:
            return _matrix(self._kind, outputs, matrix.inputs, device)

        return HostMatrix(make, rows, places, matrix.inputs, _CPU, _allocate)

    def part(self, held: range) -> _Part:
        return _Part(self, held)

    def check(self, rows: int, hidden: int) -> None:
        x = torch.randn(rows, hidden)
        expected = mixture_reference(x, self.norm, 1e-6, self.whole)
        found = hosted_mixture(x, self.norm, 1e-6, self.divided, self.host, self.team)
        error = float((found - expected).norm() / (expected - x).norm())
        assert error < (1e-2 if INTERPRETED else 1e-3), error  # kernels of GPUs round to bfloat16


class _Part:
    """What a rank has of a layer: one of its experts on the device."""

    def __init__(self, layer: _Layer, held: range) -> None:
        whole, num_held = layer.whole, len(held)
        self.team = HostTeam(_CPU, torch.float32, _allocate, buffer_experts=2, processors=processors_of_one_node())
        matrices, hosted = [], []
        for matrix in (whole.gate_up, whole.down):
            rows = matrix.outputs // _EXPERTS
            own, others = layer.empty(matrix, rows), layer.empty_hosted(matrix, rows, num_held)
            for place, expert in enumerate(held):
                parts = [part[len(part) * expert // _EXPERTS :][: len(part) // _EXPERTS] for part in matrix.tensors]
                targets = own.tensors if not place else others.places(place - 1, 1)
                for target, part in zip(targets, parts, strict=True):
                    target.copy_(part)
            matrices.append(own)
            hosted.append(others)
        self.host = HostExperts(
            *(hosted[0], hosted[1], (matrices[0], matrices[1]), torch.float32),
            stream_places=2,
            num_experts=_EXPERTS,
            slots=_TOP_K,
            gated=True,
            activation="silu",
            first=held.start,
            num_held=num_held,
        )
        gate_up_bias, down_bias = (
            None if part is None else part.view(_EXPERTS, -1)[held.start : held.stop].flatten()
            for part in layer.host.biases
        )
        self.host.biases = (gate_up_bias, down_bias)
        self.team.layers.append(self.host)
        self.team.prepare()
        self.divided = replace(
            whole,
            gate_up=matrices[0],
            down=matrices[1],
            first=held.start,
            slot_of=self.host.slot_of,
            expert_on=self.host.experts_on,
        )


@pytest.mark.parametrize("name", ("Q4", "float32") if INTERPRETED else tuple(_LAYOUTS))  # interpreted, each takes long
@pytest.mark.parametrize("streams", [False, True])
def test_experts_in_host_memory_give_the_results_of_a_whole_mixture(name: str, streams: bool) -> None:
    layer = _Layer(_LAYOUTS[name], 256, 128, gated=True, biased=name == "FP4")
    layer.team.rates = HostRates(1.0, 1e9) if streams else HostRates(1e9, 1.0)
    for rows in (1, 7):
        layer.check(rows, 256)


class _SlowedLibrary:
    """The functions in C of a host whose first products other programs slow. It has a clock of its own."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._products_s = [0.02 + 0.005 * number for number in range(9)]
        self.now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def host_experts(self, call: object) -> None:
        self._library.host_experts(call)
        self.now_s += self._products_s.pop() if self._products_s else 0.001


def test_probe_of_the_host_goes_on_while_other_programs_slow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _SlowedLibrary(native_library().library)
    monkeypatch.setattr(host_team, "native_library", lambda: SimpleNamespace(library=library))
    monkeypatch.setattr(host_team, "time", SimpleNamespace(perf_counter=lambda: library.now_s))
    layer = _Layer(torch.float32, 256, 128, gated=True, biased=False)
    assert layer.team.rates is not None
    assert layer.team.rates.host == pytest.approx(_TOP_K * layer.host.expert_bytes / 0.001)


@pytest.mark.parametrize("name", ["Q4", "float32"])
def test_experts_without_a_gate_and_of_odd_widths_give_the_same_results(name: str) -> None:
    layer = _Layer(_LAYOUTS[name], 160, 96, gated=False, biased=False)
    layer.team.rates = HostRates(1e9, 1.0)
    layer.check(5, 160)


@pytest.mark.parametrize("streams", [False, True])
def test_experts_that_changed_places_give_the_same_results(streams: bool) -> None:
    layer = _Layer(FP4, 256, 128, gated=True, biased=True)
    layer.team.rates = HostRates(1.0, 1e9) if streams else HostRates(1e9, 1.0)
    for hot in (5, 0, 3):
        layer.host.counts.copy_(torch.arange(_EXPERTS))
        layer.host.counts[hot] = 1000
        before = layer.team.num_exchanges
        for _ in range(6):
            layer.team.between_steps()
        assert int(layer.host.slot_of[hot]) >= 0
        assert layer.team.num_exchanges >= before
        layer.check(4, 256)
    assert layer.team.num_exchanges > 1


@pytest.mark.skipif(not INTERPRETED, reason="flags are raised by kernels")
def test_rows_that_nobody_takes_back_do_not_disturb_the_next_ones() -> None:
    layer = _Layer(Q4, 256, 128, gated=True, biased=False)
    layer.team.rates = HostRates(1e9, 1.0)
    layer.check(1, 256)
    for rows in (7, 1, 3):  # steps that failed after they gave their rows
        joint = layer.team.joint(layer.host, rows)
        choice = choose_rows_reference(torch.randn(rows, 256), layer.norm, 1e-6, layer.divided)
        hand_over(torch.randn(rows, 256), layer.norm, 1e-6, choice, layer.host, joint, None)
    layer.check(4, 256)
    assert joint.flags is not None
    assert int(joint.flags.given) == int(joint.flags.done) == 5


@pytest.mark.skipif(not INTERPRETED, reason="flags are raised by kernels")
def test_rows_are_seen_after_a_pause_and_the_thread_that_looks_for_them_ends_with_its_team() -> None:
    layer = _Layer(Q4, 256, 128, gated=True, biased=False)
    layer.team.rates = HostRates(1e9, 1.0)
    time.sleep(0.5)  # it looks every ten milliseconds by then
    layer.check(1, 256)
    layer.team.between_steps()
    layer.check(2, 256)
    num_threads = len(os.listdir("/proc/self/task"))
    layer.team.close()
    wait_until(lambda: len(os.listdir("/proc/self/task")) < num_threads)


@pytest.mark.parametrize("name", ["FP4", "float32"])
@pytest.mark.parametrize("streams", [False, True])
def test_ranks_together_give_the_results_of_a_whole_mixture(name: str, streams: bool) -> None:
    """Each has half of the experts, and all but one of those in host memory."""
    whole = _Layer(_LAYOUTS[name], 256, 128, gated=True, biased=True)
    x = torch.randn(3, 256)
    expected = mixture_reference(x, whole.norm, 1e-6, whole.whole, torch.zeros_like(x))
    total = torch.zeros_like(x)
    for rank in range(2):
        part = whole.part(range(rank * _EXPERTS // 2, (rank + 1) * _EXPERTS // 2))
        part.team.rates = HostRates(1.0, 1e9) if streams else HostRates(1e9, 1.0)
        total += hosted_mixture(x, whole.norm, 1e-6, part.divided, part.host, part.team, torch.zeros_like(x))
    assert float((total - expected).norm() / expected.norm()) < (1e-2 if INTERPRETED else 1e-3)


@pytest.mark.parametrize("name", ("Q4", "float32") if INTERPRETED else _BLOCK_LAYOUTS)
@pytest.mark.parametrize(("rows", "gated"), [(1, True), (7, False), (MAX_ROWS + 1, True)])
def test_block_in_host_memory_gives_the_results_of_its_matrices(name: str, rows: int, gated: bool) -> None:
    torch.manual_seed(2)
    kind, hidden, inner = _LAYOUTS[name], 256, 128
    team = HostTeam(_CPU, torch.float32, _allocate, buffer_experts=0, processors=processors_of_one_node())
    outputs = (1 + gated) * inner
    up_values, down_values = torch.randn(outputs, hidden) / 16, torch.randn(hidden, inner) / 12
    matrices = _hosted(kind, up_values), _hosted(kind, down_values)
    host = HostBlock(*matrices, torch.float32, gated=gated, activation="silu")
    bias = torch.randn(outputs)
    host.biases = (bias, None)
    team.layers.append(host)
    team.prepare()
    team.rates = HostRates(1e9, 1.0)
    x, residual = torch.randn(rows, hidden), torch.randn(rows, hidden)
    up, down = (_filled(kind, values).values().float() for values in (up_values, down_values))
    wide = x @ up.t() + bias
    mid = torch.nn.functional.silu(wide[:, :inner]) * wide[:, inner:] if gated else wide.relu().square()
    expected = mid @ down.t()
    found = hosted_block(x, host, team, residual.clone()) - residual
    assert float((found - expected).norm() / expected.norm()) < (1e-2 if INTERPRETED else 1e-3)


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [
        ([], 1, [[0, 1, 2, 3]]),
        (["0-3"], 2, [[0, 1], [2, 3]]),
        (["0-1", "2-3"], 1, [[0, 1]]),
        (["0-1", "2-3"], 2, [[0, 1], [2, 3]]),
        (["0-1", "2-3"], 3, [[0], [2, 3], [1]]),
        (["0", "1-3"], 2, [[1, 2, 3], [0]]),
        (["0-3"], 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (["0-15"], 1, [[0, 1, 2, 3]]),
        (["damaged"], 1, [[0, 1, 2, 3]]),
    ],
)
def test_ranks_share_processors_of_memory_nodes(
    nodes: list[str], count: int, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for number, text in enumerate(nodes):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert [processors_of_one_node(number, count, tmp_path) for number in range(count)] == expected


def test_exchange_pays_only_for_experts_that_are_used_far_more_often() -> None:
    on, places = torch.tensor([0, 1]), torch.tensor([2, -1, 3])
    assert exchange_of(torch.tensor([50, 40, 90, 45]), on, places, ExchangeRule()) == (1, 0)
    assert exchange_of(torch.tensor([50, 40, 70, 45]), on, places, ExchangeRule()) is None
    assert exchange_of(torch.tensor([0, 0, 0, 0]), on, places, ExchangeRule()) is None
