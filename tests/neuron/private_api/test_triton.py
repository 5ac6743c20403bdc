"""What is used of Triton without a promise: kernels are compiled at their first launch without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading import warmup
from cortex.neuron.engine.loading.kernel_pass import ModelToCompile, kernel_pass
from cortex.neuron.kernels import jit
from cortex.neuron.kernels.device_properties import CARDS
from cortex.neuron.layers.configs import WHOLE
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.private_api import triton as private

from ..failed_probes import REASON, fail_probe
from ..tiny_models import tiny_sizes

pytestmark = pytest.mark.skipif(private.triton is None, reason="needs Triton")


def test_kernels_are_compiled_by_triton_itself_where_launches_cannot_be_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert jit._decorator(interpreted=False) is jit._compiled  # noqa: SLF001
    fail_probe(monkeypatch, private.COLLECTED_LAUNCHES)
    assert jit._decorator(interpreted=False) is private.triton.jit  # noqa: SLF001


def test_nothing_is_compiled_ahead_where_launches_cannot_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "qwen3", **tiny_sizes(vocab_size=64, hidden_size=64)}
    passed = ModelToCompile(read_architecture(config), {}, torch.bfloat16, torch.bfloat16, WHOLE, 16, 128)
    fail_probe(monkeypatch, private.COLLECTED_LAUNCHES)
    assert kernel_pass(passed, torch.device("cuda")) is None
    with pytest.raises(LoadError, match=REASON):
        warmup._use_card(CARDS["sm_90"])  # noqa: SLF001


def test_only_kernels_of_the_card_that_is_here_are_compiled_without_the_offline_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_probe(monkeypatch, private.OFFLINE_DRIVER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warmup, "properties_of", lambda _: CARDS["sm_90"])
    warmup._use_card(CARDS["sm_90"])  # noqa: SLF001
    with pytest.raises(LoadError, match="only for the card that is here"):
        warmup._use_card(CARDS["sm_80"])  # noqa: SLF001


@pytest.mark.parametrize("fails", [False, True])
def test_key_of_the_cache_is_the_recorded_one_or_that_of_triton(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> str:
        return "own key"

    if fails:
        fail_probe(monkeypatch, private.RECORDED_KEY)
    monkeypatch.setattr(private, "key_of_record", lambda _: "recorded")
    monkeypatch.setattr(private.triton.runtime.cache, "triton_key", own)
    private.use_recorded_key()
    key = private.triton.runtime.cache.triton_key()
    assert key == ("own key" if fails else f"{private.triton.__version__}-recorded")


def test_driver_without_launchers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_is_probed": False, "_problem": None}.items():
        monkeypatch.setattr(private.LAUNCHERS, name, value)
    monkeypatch.setattr(private.triton.runtime.driver, "_active", SimpleNamespace())
    private.build_launcher(SimpleNamespace(src="source", metadata="metadata"))
    assert "launcher_cls" in str(private.LAUNCHERS.problem)


def test_notes_are_where_the_environment_says_without_knobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = private.cache_folder()
    fail_probe(monkeypatch, private.CACHE_FOLDER)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert private.cache_folder() == Path.home() / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert private.cache_folder() == tmp_path != known
