"""Random histories of a model that is too large for its memory: requests with and without pictures are preempted and
cancelled, drafts are checked, the model sleeps and is loaded again, and prefixes come back from host memory. It
responds as one with room for everything. What the histories are for is counted, and must happen.

On a GPU and on a CPU, with the arithmetic that does not depend on the batch:

    pytest -m gpu tests/neuron/engine/test_device_histories.py
    make fuzz ARGS=tests/neuron/engine/test_device_histories.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.request import EngineRequest, EngineStats, LoadSpec

from ..models.vision_models import Prompt, random_image, spec_of, text, write_vision_model
from .speculation.counting_models import AnyWidths
from .test_sleep import wake

MAX_TOKENS = 16
END_TOKENS = 28
"""Of a page of 32: what a prompt has in its last one. So its response soon needs another page."""
HOST_BYTES = 64 << 20
PROMPTS = range(6)
WITH_PICTURES = PROMPTS[1::2]
REACHED = (
    *("requests with pictures", "preemptions", "preemptions with pictures", "cancellations", "sleeps", "swaps"),
    *("cached tokens", "fetched tokens", "fetched tokens with pictures", "accepted drafts", "rejected drafts"),
)
LEAST_HISTORIES = {"cpu": 1, "cuda": 5}
"""Of a run. A GPU takes other steps each time, so that one history may not reach everything."""


@dataclass(frozen=True, slots=True)
class Size:
    dtype: str
    text_tokens: int
    """Fewest in a prompt."""
    context_tokens: int
    num_pages: int
    """Too few for two requests of the whole context."""


SIZES = {"cpu": Size("float32", 15, 192, 9), "cuda": Size("bfloat16", 300, 512, 26)}
"""A GPU fetches no fewer than eight pages from host memory."""


@dataclass
class Family:
    """The prompts for a model, and what one with room for everything responds."""

    folder: Path
    device: torch.device
    plain: Engine = field(init=False)
    known: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plain = self.load(speculation="off")

    @property
    def size(self) -> Size:
        return SIZES[self.device.type]

    def load(self, num_pages: int | None = None, random: Random | None = None, **changes: Any) -> Engine:
        """`num_pages`: None: there is room for everything. `random`: of how many draft tokens are checked."""
        options: dict[str, Any] = {"dtype": self.size.dtype, "context_tokens": self.size.context_tokens}
        options |= {"max_num_seqs": 4, "prefill_chunk_tokens": 96, "deterministic": True, "memory_bytes": 1 << 30}
        spec = LoadSpec(str(self.folder), **(options | changes))
        loaded = load_model(spec, self.device, lambda *_: None, lambda: False)
        if num_pages is not None:
            loaded.memory.num_pages = dict.fromkeys(loaded.memory.num_pages, num_pages)
        rule = AnyWidths(random or Random(0))
        engine = Engine(loaded, spec, width_rule=lambda _: rule, reserved_tokens=0)
        engine.warm_up()
        return engine

    def prompt(self, number: int) -> Prompt:
        """Every second one has pictures; those with the same remainder begin alike."""
        spec = spec_of(self.folder)
        parts: list[Any] = [text(self.size.text_tokens + number % 3 * 30, number % 3)]
        if number in WITH_PICTURES:
            parts += [random_image(60, 40, number), text(3, number), random_image(9, 40, number)]
        num_tokens = len(Prompt.of(spec, parts).tokens)
        return Prompt.of(spec, [*parts, text((END_TOKENS - num_tokens - 1) % 32 + 1, number)])

    def expected(self, number: int) -> list[int]:
        if number not in self.known:
            request = self.prompt(number).request("plain", MAX_TOKENS)
            self.known[number], _ = responses(self.plain, [request])["plain"]
        return self.known[number]


def responses(
    engine: Engine, requests: Sequence[EngineRequest], cancelled: str = "", after: int = -1
) -> dict[str, tuple[list[int], bool]]:
    """The tokens of each, and whether the response ended by itself; `cancelled` is cancelled after some steps."""
    found: dict[str, tuple[list[int], bool]] = {request.id: ([], False) for request in requests}
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work:
        if steps == after:
            engine.cancel(cancelled)
        steps += 1
        for output in engine.step():
            tokens, _ = found[output.request_id]
            found[output.request_id] = [*tokens, *output.tokens], output.finish == "length"
    return found


class History:
    """What happens to one model; `reached` counts it."""

    def __init__(self, family: Family, random: Random, reached: Counter[str]) -> None:
        self._family = family
        self._random = random
        self._reached = reached
        self._host = DeviceHostMemory.on(family.device)
        self._host.verifies = True
        self._host.store.limit(HOST_BYTES)
        self._engine = self._load()

    def _load(self) -> Engine:
        engine = self._family.load(self._family.size.num_pages, self._random)
        engine.keep_pages(self._host)
        return engine

    def happen(self) -> None:
        """Pages that a sleep or a swap keeps are of use to the requests after it."""
        for event in self._random.sample((self._sleep, self._swap, self._idle), 3):
            self._ask(self._random.sample(WITH_PICTURES, len(WITH_PICTURES)))
            event()
            self._ask(self._random.sample(PROMPTS, 3))
            self._engine.check_integrity()

    def _sleep(self) -> None:
        self._engine.sleep()
        wake(self._engine)
        self._reached["sleeps"] += 1

    def _swap(self) -> None:
        self._unload()
        self._engine = self._load()
        self._reached["swaps"] += 1

    def _idle(self) -> None:
        while self._engine.prepare():
            pass

    def _ask(self, numbers: Sequence[int]) -> None:
        random, reached = self._random, self._reached
        requests = [self._request(number) for number in numbers]
        cancelled = random.choice([*(request.id for request in requests), "", ""])
        before = self._engine.stats()
        found = responses(self._engine, requests, cancelled, random.randint(0, 30))
        for number, request in zip(numbers, requests, strict=True):
            (tokens, has_ended), expected = found[request.id], self._family.expected(number)
            assert tokens == (expected if has_ended else expected[: len(tokens)])
            assert has_ended or request.id == cancelled
            reached["cancellations"] += not has_ended
            reached["requests with pictures"] += has_ended and bool(request.pictures)
        self._count(before, self._engine.stats(), have_pictures=all(request.pictures for request in requests))

    def _count(self, before: EngineStats, after: EngineStats, *, have_pictures: bool) -> None:
        counts = {
            "preemptions": after.preemptions - before.preemptions,
            "fetched tokens": after.fetched_tokens - before.fetched_tokens,
            "cached tokens": after.cached_tokens - before.cached_tokens,
        }
        if have_pictures:
            counts |= {f"{name} with pictures": count for name, count in counts.items()}
        drafted, accepted = (
            sum(getattr(after, name).values()) - sum(getattr(before, name).values())
            for name in ("drafted_tokens", "accepted_tokens")
        )
        self._reached.update(counts | {"accepted drafts": accepted, "rejected drafts": drafted - accepted})

    def _request(self, number: int) -> EngineRequest:
        """With a prediction of the response that may be wrong from some place on."""
        response, place = self._family.expected(number), self._random.randrange(2 * MAX_TOKENS)
        prediction = (*response[:place], *response[place + 1 :])
        return self._family.prompt(number).request(str(number), MAX_TOKENS, prediction=prediction)

    def _unload(self) -> None:
        self._engine.save_pages()
        self._engine.close()

    def end(self) -> None:
        self._unload()
        self._host.store.limit(0)
        assert self._host.store.num_bytes == 0, "no copy has been forgotten"


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", "qwen3_5"),
        *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in ("qwen3_5", "qwen3_vl")),
    ],
    ids="-".join,
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """With recurrent layers; on a GPU one with attention alone, too."""
    device, name = request.param
    folder = tmp_path_factory.mktemp("histories")
    write_vision_model(name, folder)
    found = Family(folder, torch.device(device))
    yield found
    found.plain.close()


@pytest.mark.hypothesis
def test_model_with_any_history_responds_as_one_with_room(family: Family) -> None:
    reached: Counter[str] = Counter()
    num_histories = max(LEAST_HISTORIES[family.device.type], hypothesis.settings().max_examples // 100)

    @hypothesis.settings(max_examples=num_histories, phases=(hypothesis.Phase.generate,))
    @hypothesis.given(seed=st.integers(0, 1 << 30))
    def happens(seed: int) -> None:
        history = History(family, Random(seed), reached)
        history.happen()
        history.end()

    happens()
    assert not [name for name in REACHED if not reached[name]]
