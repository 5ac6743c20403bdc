"""Benchmarks that load models. Those of loads run on a model so small that it takes seconds, and print results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.memory.device import compute_dtype
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.kernels.cpu.native import multiplies_codes
from cortex.neuron.kernels.quantised.recipes import recipe_of

ROOT = Path(__file__).parents[3]
STAGES = ["open s", "read s", "pages s", "warm s", "token s", "total s"]


def test_files_as_stored_and_quantised_at_load_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_quant = multiplies_codes(compute_dtype("auto", torch.device("cpu")))
    dense = "q4" if has_quant else "bf16"
    options = ["--shape", "tiny", "--device", "cpu", "--runs", "1", "--only", "gguf"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(sys, "argv", ["loads.py", *options, "--json", str(tmp_path / "report.json")])
    loads = import_module("loads")
    assert loads.main() == 0
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert list(results) == ["gguf"]
    path = loads.written([dense], "tiny", tmp_path)[dense]
    monkeypatch.setattr(sys, "argv", ["loads.py", "--device", "cpu", "--only", dense, "--alone", str(path)])
    capsys.readouterr()
    assert loads.main() == 0  # what the process of a variant runs, in this one
    results[dense] = json.loads(capsys.readouterr().out)
    for figures in results.values():
        assert figures["total s"] == pytest.approx(sum(figures[stage] for stage in STAGES[:-1]))
        assert figures["GB"] > 0


@pytest.mark.parametrize("quant", ["q4", "q8", "fp8"])
def test_quantised_speculation_packs_every_matrix(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that knows every name has no length, and is no empty one."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    layouts = import_module("speculation").layouts_of(quant, "cuda")
    recipe = recipe_of(quant)
    assert recipe is not None
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        assert layouts[name] == recipe.layout_of(name)


def test_bytes_that_a_token_reads_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    info = replace(import_module("scripted_engine").engine_info(1), weight_bytes=9 * 10**9)
    weights_read = import_module("workloads").weights_read
    assert weights_read(info) == "weights: 9.000 GB"
    told = weights_read(replace(info, work=StepWork(5 * 10**9)))
    assert told == "weights: 9.000 GB, 5.000 GB of them read for a token"
