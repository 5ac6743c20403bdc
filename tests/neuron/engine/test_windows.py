"""An engine over models with sliding windows: responses far longer than a window are those of the reference library,
however they are computed, and layers with a window keep the pages of the window only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import RESERVED_TOKENS, Engine
from cortex.neuron.engine.kv.page_groups import window_pages
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage

from ..engine_runs import tokens_of
from ..models.reference_models import randomised
from ..tiny_models import tiny_sizes
from .tiny_engine import CPU, PAGE, VOCAB, ask, run, some_tokens

MODELS: dict[str, dict[str, Any]] = {
    "mixed": {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "windows only": {"sliding_window": 70, "layer_types": ["sliding_attention"] * 4},
}
NUM_DRAWN = 40
SHARED = some_tokens(200, seed=1)
REQUESTS: list[EngineRequest] = [
    ask("long", some_tokens(330, seed=2), NUM_DRAWN),
    ask("shared", (*SHARED, 9), NUM_DRAWN),
    ask("shared too", (*SHARED, 9, 8, 7), NUM_DRAWN),
    ask("shorter", (*SHARED[:100], 3), NUM_DRAWN),
    ask("within the window", (5, 6), NUM_DRAWN),
]


class Windowed:
    """A checkpoint, and the responses that the reference library agrees with."""

    def __init__(self, name: str, folder: Path) -> None:
        sizes = tiny_sizes(
            vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, max_position_embeddings=1024, head_dim=12
        )
        self.config = transformers.Qwen3Config(
            **sizes, use_sliding_window=True, attn_implementation="eager", **MODELS[name]
        )
        reference = randomised(lambda: transformers.Qwen3ForCausalLM(self.config), std=0.25, vector_std=0.5)
        reference.save_pretrained(folder)
        self.path = folder
        self.window: int = MODELS[name]["sliding_window"]
        self.is_mixed = name == "mixed"
        engine = Engine.load(LoadSpec(str(folder), dtype="float32"), CPU, lambda *_: None, lambda: False)
        self.expected = responses(engine, *REQUESTS)
        engine.close()
        for request in REQUESTS:
            drawn = self.expected[request.id]
            with torch.inference_mode():
                logits = reference(torch.tensor([(*request.prompt, *drawn[:-1])])).logits[0]
            assert logits[-NUM_DRAWN:].argmax(-1).tolist() == drawn

    def sizes(self, **changes: Any) -> ModelSizes:
        return ModelSizes.of(read_architecture(self.config.to_dict() | changes), WeightStorage(4))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    return Windowed(request.param, tmp_path_factory.mktemp("windows"))


EngineLoader = Callable[..., Engine]


@pytest.fixture
def load(model: Windowed) -> Iterator[EngineLoader]:
    """Loads engines; `late` ones read a step after the next is launched, as on a GPU."""
    engines: list[Engine] = []

    def make(*, late: bool = False, reserved_tokens: int = RESERVED_TOKENS, **changes: Any) -> Engine:
        options: dict[str, Any] = {"path": str(model.path), "dtype": "float32", "max_num_seqs": 6}
        spec = LoadSpec(**(options | changes))
        loaded = load_model(spec, CPU, lambda *_: None, lambda: False)
        engines.append(Engine(loaded, spec, overlaps=late, reserved_tokens=reserved_tokens))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def responses(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(engine, *requests).items()}


@pytest.mark.parametrize("options", [{}, {"late": True, "prefill_chunk_tokens": 50}], ids=["whole", "chunked"])
def test_responses_are_those_of_the_reference_library(
    model: Windowed, load: EngineLoader, options: dict[str, Any]
) -> None:
    engine = load(**options)
    assert responses(engine, *REQUESTS) == model.expected
    again = run(engine, *REQUESTS)
    assert {name: tokens_of(outputs) for name, outputs in again.items()} == model.expected
    assert again["shared"][0].cached_tokens == 200, "the prefix is reused as in a model without windows"


def test_prompt_that_is_computed_token_by_token_has_the_same_response(model: Windowed, load: EngineLoader) -> None:
    engine = load(late=True, prefill_chunk_tokens=1)
    assert responses(engine, *REQUESTS[3:]) == {name: model.expected[name] for name in ("shorter", "within the window")}


def test_deterministic_responses_are_those_of_the_reference_library(model: Windowed, load: EngineLoader) -> None:
    assert responses(load(deterministic=True), REQUESTS[3]) == {"shorter": model.expected["shorter"]}


def test_responses_survive_preemption(model: Windowed, load: EngineLoader) -> None:
    sizes = model.sizes()
    num_pages = 13 if model.is_mixed else 7
    memory_bytes = sizes.fixed_bytes(1024) + num_pages * sizes.page_bytes
    # Nothing is reserved, so that more sequences start than fit.
    engine = load(late=model.is_mixed, reserved_tokens=0, memory_bytes=memory_bytes, max_num_seqs=6)
    several = [ask(str(number), REQUESTS[4].prompt, 90) for number in range(3)]
    several += [ask(f"other {number}", some_tokens(20, seed=number), 90) for number in range(3)]
    expected = responses(load(), *several)
    assert responses(engine, *several) == expected
    assert engine.stats().preemptions > 0


def test_long_sequence_holds_the_pages_of_its_window_only(model: Windowed, load: EngineLoader) -> None:
    engine = load(prefill_chunk_tokens=PAGE)
    engine.submit(ask("r", some_tokens(600, seed=5), 100))
    used = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        used.append(engine.stats().used_pages)
    if model.is_mixed:
        assert max(used) == -(-699 // PAGE), "the layers without a window hold everything"
    else:
        assert max(used) <= window_pages(model.window, PAGE) + 1, "besides the window, the chunk of a step"


def test_prompt_longer_than_the_memory_of_windows_is_computed(model: Windowed, load: EngineLoader) -> None:
    """Chunks shrink to the free pages of the window, which does not limit the context."""
    sizes = model.sizes()
    num_pages = 14 if model.is_mixed else window_pages(model.window, PAGE) + 1
    context = 13 * PAGE if model.is_mixed else 1024
    engine = load(memory_bytes=sizes.fixed_bytes(context) + num_pages * sizes.page_bytes, max_num_seqs=1)
    assert engine.info.context_tokens == context
    assert responses(engine, REQUESTS[0]) == {"long": model.expected["long"]}


def test_windows_report_a_larger_capacity(model: Windowed, load: EngineLoader) -> None:
    """The same weights with windows and without, in the same memory."""
    without = model.sizes(layer_types=["full_attention"] * 4)
    num_pages = 40 if model.is_mixed else 12
    engine = load(memory_bytes=without.fixed_bytes(1024) + num_pages * without.page_bytes, max_num_seqs=1)
    if model.is_mixed:
        assert engine.info.num_pages > 1.4 * num_pages
    else:
        assert engine.info.context_tokens == 1024 > (num_pages - 1) * PAGE


def test_model_wakes_with_the_same_groups(model: Windowed, load: EngineLoader) -> None:
    engine = load()
    before = engine.stats().num_pages
    engine.sleep()
    engine.wake(lambda *_: None)
    assert engine.stats().num_pages == before
    assert responses(engine, *REQUESTS[1:3]) == {name: model.expected[name] for name in ("shared", "shared too")}
