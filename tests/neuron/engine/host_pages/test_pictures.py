"""Pages with pictures come back for the same pictures at the same places, as the same tower sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.request import LoadSpec

from ...engine_runs import run, tokens_of
from ...models.vision_models import Prompt, random_image, spec_of, text, write_vision_model
from .engines import CPU, new_host


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_vision_model("qwen3_vl", folder)
    return folder


@contextmanager
def loaded(path: Path, host: DeviceHostMemory, *, changes_tower: bool = False) -> Iterator[Engine]:
    """An engine whose tower is on another device than its layers, as with `vision = "cpu"`; its pages are saved in the
    end."""
    spec = LoadSpec(str(path), dtype="float32", max_num_seqs=2)
    engine = Engine.load(spec, CPU, lambda *_: None, lambda: False)
    assert engine.model.tower is not None
    tower = engine.model.tower.parameters
    tower.device = torch.device("cpu", 0)
    if changes_tower:
        torch.empty(0, dtype=torch.uint8).set_(tower.storages()[-1])[0] ^= 1
    engine.keep_pages(host)
    yield engine
    engine.save_pages()
    engine.close()


def respond(engine: Engine, prompt: Prompt) -> tuple[list[int], int]:
    outputs = run(engine, prompt.request("r", max_tokens=3))["r"]
    return tokens_of(outputs), sum(output.cached_tokens or 0 for output in outputs)


def test_pages_come_back_for_the_same_pictures_only(path: Path) -> None:
    host, spec, first, second = new_host(), spec_of(path), random_image(96, 64, 1), random_image(96, 64, 2)
    shown = Prompt.of(spec, [text(70, 1), first, text(40, 2)])
    with loaded(path, host) as engine:
        expected, cached = respond(engine, shown)
        assert cached == 0
    with loaded(path, host) as engine:
        assert respond(engine, shown) == (expected, len(shown.tokens) // 32 * 32)
        assert respond(engine, Prompt.of(spec, [text(70, 1), second, text(40, 2)]))[1] == 64
        assert respond(engine, Prompt.of(spec, [text(70, 1), text(1, 3), first, text(40, 2)]))[1] == 64


def test_pages_of_another_tower_are_never_taken(path: Path) -> None:
    host = new_host()
    shown = Prompt.of(spec_of(path), [random_image(96, 64, 1), text(70, 1)])
    with loaded(path, host) as engine:
        respond(engine, shown)
    with loaded(path, host, changes_tower=True) as engine:
        assert respond(engine, shown)[1] == 0
