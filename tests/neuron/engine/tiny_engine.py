"""The engine over a tiny random model on the CPU, requests for it, and the responses that it gives to each alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import RESERVED_TOKENS, Engine
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams, StepOutput
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage

from .. import engine_runs
from ..engine_runs import tokens_of
from ..tiny_models import tiny_sizes

CPU = torch.device("cpu")
VOCAB = 97
CONTEXT = 256
PAGE = 32
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, max_position_embeddings=CONTEXT)
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.25)
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path


EngineMaker = Callable[..., Engine]


@pytest.fixture
def make_engine(checkpoint: Path) -> Iterator[EngineMaker]:
    """Loads engines; `late` ones read a step after the next is launched, as on a GPU; `pages` bounds memory."""
    engines: list[Engine] = []

    def make(
        *, late: bool = False, pages: int | None = None, reserved_tokens: int = RESERVED_TOKENS, **changes: Any
    ) -> Engine:
        options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6}
        if pages is not None:
            config = json.loads((checkpoint / "config.json").read_text())
            sizes = ModelSizes.of(read_architecture(config), WeightStorage(4))
            options["memory_bytes"] = sizes.fixed_bytes(CONTEXT) + (pages + 1) * sizes.page_bytes
        spec = LoadSpec(str(checkpoint), **(options | changes))
        loaded = load_model(spec, CPU, lambda *_: None, lambda: False)
        engines.append(Engine(loaded, spec, overlaps=late, reserved_tokens=reserved_tokens))
        assert pages in (None, engines[-1].info.num_pages)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def some_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    ids = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(ids.tolist())


def ask(
    name: str, prompt: Sequence[int], max_tokens: int = 12, params: SamplingParams = GREEDY, **more: Any
) -> EngineRequest:
    return EngineRequest(name, prompt, max_tokens, params, **more)


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[StepOutput]]:
    """The outputs of each request, all of which end and leave nothing behind."""
    outputs = engine_runs.run(engine, *requests)
    for request in requests:
        assert [output.finish is not None for output in outputs[request.id]].index(True) == len(outputs[request.id]) - 1
    assert engine.stats().used_pages == engine.stats().running == engine.stats().waiting == 0
    return outputs


def mixed_batch() -> list[EngineRequest]:
    """Short and long, alike and different, greedy and sampled, plain and penalised."""
    shared = some_tokens(70, seed=1)
    return [
        ask("short", (5,), 20),
        ask("long", some_tokens(150, seed=2), 15),
        ask("shared", (*shared, 9), 10),
        ask("shared too", (*shared, 9, 8, 7), 12),
        ask("the same again", (*shared, 9), 10),
        ask("page", some_tokens(PAGE, seed=3), 33),
        ask("pages", some_tokens(2 * PAGE, seed=3), 3),
        ask("seeded", shared[:40], 16, SamplingParams(temperature=0.9, top_p=0.9, seed=7)),
        ask("penalised", some_tokens(20, seed=4), 40, SamplingParams(temperature=0.0, frequency_penalty=0.7)),
        ask(
            "repetitive",
            some_tokens(20, seed=4),
            40,
            SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.3, repetition_window=16),
        ),
    ]


@pytest.fixture(scope="session")
def alone(checkpoint: Path) -> dict[str, list[int]]:
    """The response to each request alone in an engine, in one prefill and uncached."""
    said = {}
    for request in mixed_batch():
        engine = Engine.load(LoadSpec(str(checkpoint), dtype="float32"), CPU, lambda *_: None, lambda: False)
        said[request.id] = tokens_of(run(engine, request)[request.id])
        engine.close()
    assert len(set(map(tuple, said.values()))) >= 7, "the model says too little for a test"
    return said
