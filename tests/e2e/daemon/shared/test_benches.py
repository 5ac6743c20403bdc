"""Benchmarks against the shared daemon, here for a short while: their results are what they should be."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ....programs import PYTHONPATH

if TYPE_CHECKING:
    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

BENCH = Path(__file__).parents[4] / "bench"


def test_memory_is_the_same_after_two_models_took_turns(
    daemon: Daemon, wide_model: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["load_cycles.py", "--cycles", "8", str(wide_model), str(tiny_model)])
    monkeypatch.syspath_prepend(str(BENCH))
    load_cycles = import_module("load_cycles")
    node = import_module("daemon").Neuron(daemon.url)
    monkeypatch.setattr(load_cycles, "running_neuron", lambda: nullcontext((node, daemon.process.pid)))
    assert load_cycles.main() == 0


def test_traffic_reaches_a_node_with_schemas_and_tools(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    traffic, checkpoint = import_module("traffic"), import_module("random_checkpoint")
    checkpoint.write_checkpoint(import_module("shapes").SHAPES["tiny"], tmp_path / "model")
    node = import_module("daemon").Neuron(daemon.url)
    node.load("bench", str(tmp_path / "model"))
    server = asyncio.run(traffic.calibrated(traffic.Server(node.url, "bench")))
    kinds = ("text", "json", "agent")
    tasks = [traffic.Task(0.0, kind, seed, 60, 8, num_turns=2) for seed, kind in enumerate(kinds)]
    records = traffic.run_processes(server, tasks, 1).records
    assert [(record.kind, record.error) for record in records] == [(kind, "") for kind in kinds for _ in range(2)]
    assert all(record.prompt_tokens > 8 >= record.completion_tokens > 0 for record in records)
    assert records[-1].cached_tokens > 0, "an agent continues its conversation"
    node.unload("bench")
