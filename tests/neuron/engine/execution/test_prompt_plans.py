"""Which plans are built, in which order, and what happens if the library cannot build one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cortex.neuron.engine.execution.prompt_plans import PromptPlans
from cortex.neuron.kernels.attention import cudnn
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.families.qwen import Qwen3

from ...tiny_models import tiny_sizes

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    **tiny_sizes(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        max_position_embeddings=4096,
        head_dim=8,
    ),
}
WINDOWED = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": True}


class Library:
    """Takes the place of `cudnn.prepare`: notes its calls, and fails from a length on."""

    def __init__(self, fails_from: int = 1 << 30, error: Exception | None = None) -> None:
        self.lengths: list[int] = []
        self._fails_from = fails_from
        self._error = error or cudnn.Unserved("no plan for this")

    def __call__(self, geometry: cudnn.Geometry, scale: float, length: int) -> None:
        assert geometry[2:] == (4, 2, 8)
        assert scale == 8**-0.5
        if length >= self._fails_from:
            raise self._error
        self.lengths.append(length)


def plans_of(
    monkeypatch: pytest.MonkeyPatch, library: Library, *, step_tokens: int = 2048, fast: bool = True, **changes: Any
) -> PromptPlans:
    monkeypatch.setattr(cudnn, "is_faster_on", lambda _: fast)
    monkeypatch.setattr(cudnn, "prepare", library)
    dtype = changes.pop("dtype", torch.bfloat16)
    return PromptPlans(Decoder(Qwen3(CONFIG | changes), Parameters(CPU, dtype), 4096), step_tokens)


def test_each_length_is_prepared_once_for_all_layers_shortest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    plans = plans_of(monkeypatch, library)
    while plans.prepare():
        pass
    assert library.lengths == [1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]
    assert not plans.prepare()
    assert len(library.lengths) == 9


@pytest.mark.parametrize("error", [cudnn.Unserved("not this one"), torch.OutOfMemoryError("full")])
def test_unsupported_length_ends_preparation_without_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    library = Library(1280, error)
    plans = plans_of(monkeypatch, library)
    assert plans.prepare()
    assert plans.prepare()
    assert not plans.prepare()
    assert not plans.prepare()
    assert library.lengths == [1024, 1152]


def test_device_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(monkeypatch, Library(1024, RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plans.prepare()


@pytest.mark.parametrize(
    "changes",
    [{"fast": False}, {"dtype": torch.float32}, {"step_tokens": 512}, WINDOWED],
    ids=["another device", "full precision", "short steps", "windows"],
)
def test_prepares_nothing_if_no_attention_can_use_plans(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    library = Library()
    assert not plans_of(monkeypatch, library, **changes).prepare()
    assert library.lengths == []
