"""Random histories of a model that is too large for its memory: requests with and without pictures are preempted and
cancelled, and the model sleeps and is loaded again. It responds as one with room for everything. On a GPU if there is
one, with the arithmetic that does not depend on the batch:

    make fuzz ARGS="--processes 0 tests/neuron/engine/test_device_histories.py"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.models.sizes import WeightStorage

from ..models.vision_models import Prompt, random_image, spec_of, text, write_vision_model
from .test_sleep import wake

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPE = "float32" if DEVICE.type == "cpu" else "bfloat16"
FAMILIES = ("qwen3_5", "qwen3_vl")[: 1 if DEVICE.type == "cpu" else 2]
"""One with recurrent layers; on a GPU one with attention alone, too."""
CONTEXT_TOKENS = 192
MAX_TOKENS = 40
MAX_PAGES = 12
"""Two requests of the whole context do not fit."""
EVENTS = (*["ask"] * 6, "sleep", "swap")
FEW = hypothesis.settings(
    max_examples=max(1, hypothesis.settings().max_examples // 200), phases=(hypothesis.Phase.generate,), deadline=None
)
HISTORIES = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1 << 30)), min_size=4, max_size=10)


def load(folder: Path, memory_bytes: int | None) -> Engine:
    spec = LoadSpec(
        str(folder),
        dtype=DTYPE,  # type: ignore[arg-type]
        context_tokens=CONTEXT_TOKENS,
        max_num_seqs=4,
        prefill_chunk_tokens=24,
        deterministic=True,
        memory_bytes=memory_bytes,
    )
    loaded = load_model(spec, DEVICE, lambda *_: None, lambda: False)
    engine = Engine(loaded, spec, reserved_tokens=0)
    if DEVICE.type != "cpu":
        engine.warm_up()
    return engine


def small_memory(folder: Path, plain: Engine) -> int:
    """About the least memory that a request of the whole context fits in."""
    too_little = ModelSizes.of(plain.model.architecture, WeightStorage(2)).weight_bytes
    enough = too_little + (16 << 20 if DEVICE.type == "cpu" else 1 << 30)
    for _ in range(30):
        middle = (too_little + enough) // 2
        try:
            engine = load(folder, middle)
        except LoadError:
            too_little = middle
            continue
        fits, num_pages = engine.info.context_tokens == CONTEXT_TOKENS, engine.info.num_pages
        engine.close()
        if not fits:
            too_little = middle
        elif num_pages <= MAX_PAGES:
            return middle
        else:
            enough = middle
    raise AssertionError(f"no memory has {MAX_PAGES} pages and a context of {CONTEXT_TOKENS} tokens")


@dataclass
class Family:
    """A model with room for everything, and the memory of the one that has little."""

    folder: Path
    plain: Engine
    memory_bytes: int
    known: dict[int, list[int]] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    """How often each thing has happened that histories are for."""

    def prompt(self, number: int) -> Prompt:
        """Every second one has pictures; those with the same remainder begin alike."""
        parts: list[Any] = [text(5 + number % 3 * 30, number % 3)]
        if number % 2:
            parts += [random_image(60, 40, number), text(3, number), random_image(9, 40, number)]
        return Prompt.of(spec_of(self.folder), [*parts, text(10, number)])

    def expected(self, number: int) -> list[int]:
        if number not in self.known:
            self.known[number] = responses(self.plain, {str(number): self.prompt(number)})[str(number)]
        return self.known[number]


def responses(engine: Engine, prompts: dict[str, Prompt], cancelled: str = "", after: int = -1) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.submit(prompt.request(name, MAX_TOKENS))
    steps = 0
    while engine.has_work:
        if steps == after:
            engine.cancel(cancelled)
        steps += 1
        for output in engine.step():
            found[output.request_id] += output.tokens
    return found


class History:
    """What happens to one model."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.engine = load(family.folder, family.memory_bytes)

    def happen(self, event: str, random: Random) -> None:
        if event == "ask":
            self._ask(random)
        elif event == "sleep":
            self.engine.sleep()
            wake(self.engine)
            self._family.reached["sleeps"] += 1
        else:
            self.end()
            self._family.reached["swaps"] += 1
            self.engine = load(self._family.folder, self._family.memory_bytes)

    def _ask(self, random: Random) -> None:
        numbers = random.sample(range(8), random.randint(2, 4))
        prompts = {str(number): self._family.prompt(number) for number in numbers}
        cancelled = random.choice([*prompts, "", ""])
        before = self.engine.stats().preemptions
        found = responses(self.engine, prompts, cancelled, random.randint(0, 30))
        preemptions = self.engine.stats().preemptions - before
        have_pictures = any(number % 2 for number in numbers)
        self._family.reached["preemptions with pictures" if have_pictures else "preemptions"] += preemptions
        self._family.reached["cancellations"] += bool(cancelled)
        for number in numbers:
            expected = self._family.expected(number)
            response = found[str(number)]
            assert response == (expected[: len(response)] if str(number) == cancelled else expected)

    def end(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("histories")
    write_vision_model(request.param, folder)
    plain = load(folder, 1 << 30)  # room for everything, and for the other model
    yield Family(folder, plain, small_memory(folder, plain))
    plain.close()


@FEW
@hypothesis.given(events=HISTORIES)
def test_model_with_any_history_responds_as_one_with_room(family: Family, events: list[tuple[str, int]]) -> None:
    history = History(family)
    for event, seed in events:
        history.happen(event, Random(seed))
    history.end()


def test_histories_reach_what_they_are_for(family: Family) -> None:
    """Else they would show nothing. Random ones count, too."""
    history = History(family)
    for seed in range(4):
        history.happen("ask", Random(seed))
    history.happen("sleep", Random(0))
    history.happen("ask", Random(5))
    history.happen("swap", Random(0))
    history.end()
    expected = ("preemptions with pictures", "cancellations", "sleeps", "swaps")
    assert not [name for name in expected if not family.reached[name]]
