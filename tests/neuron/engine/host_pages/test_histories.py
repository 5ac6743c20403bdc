"""Whatever happens to a model, it responds as one that has no host memory for its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

import hypothesis
import pytest
from hypothesis import strategies as st

from cortex.neuron.engine import engine as engines
from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.engine.host_pages.tier import HostTier
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams

from ...engine_runs import filled
from ..test_sleep import DENSE, HYBRID, LATENT, wake
from .engines import CPU, new_host
from .late_copies import LateCopies
from .test_tier import WINDOWED


@dataclass(frozen=True, slots=True)
class Family:
    config: dict[str, Any]
    memory_bytes: int
    """For weights and some twelve pages."""
    kv_dtype: Literal["auto", "fp8"] = "auto"


FAMILIES = {
    "dense": Family(DENSE, 190_000),
    "hybrid": Family(HYBRID, 450_000),
    "windows": Family(WINDOWED, 600_000),
    "latents": Family(LATENT, 170_000),
    "fp8": Family(DENSE, 108_000, "fp8"),
}
CONTEXT_TOKENS = 256
MAX_TOKENS = 4
NUM_CONVERSATIONS = 6
"""Together they are more than twice what the device holds."""
SHARED_TOKENS = 70
"""The first of every second conversation; they have pages in common."""
BUDGETS = (0, 40_000, 200_000, 64 << 20)
EVENTS = (*["ask"] * 8, "sleep", "swap", "other", "idle", "limit", "shrink")
FEW = hypothesis.settings(max_examples=hypothesis.settings().max_examples // 10, phases=(hypothesis.Phase.generate,))
"""A history takes most of a second: one that fails is reported as it is, rather than made shorter for minutes."""
DISK_EVENTS = (*["ask"] * 8, "sleep", "idle", "limit", "restart", "restart", "kill", "damage", "forget")
DISK_HISTORIES = st.lists(st.tuples(st.sampled_from(DISK_EVENTS), st.integers(0, 1 << 30)), min_size=8, max_size=20)
HISTORIES = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1 << 30)), min_size=8, max_size=20)


@dataclass
class Reached:
    """How often histories came to what they are to test."""

    num_shortened: int = 0
    """Prompts that got further pages while they were computed."""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Reached:
    """Pages are copied while steps run, and copies end late."""
    reached = Reached()

    class CopyingTier(HostTier):
        def shortened_front(self, request_id: str, digests: Sequence[Digest], num_computed: int, front: int) -> int:
            earlier = super().shortened_front(request_id, digests, num_computed, front)
            reached.num_shortened += earlier != front
            return earlier

        def __init__(self, *arguments: Any, **options: Any) -> None:
            forced = {"copies_ahead": True, "end_of_front": any_end_of_front, "steps_between_scans": 2}
            super().__init__(*arguments, **options | forced)

    monkeypatch.setattr(engines, "HostTier", CopyingTier)
    monkeypatch.setattr(engines, "BlockCopies", LateCopies)
    return reached


@dataclass
class PlainModel:
    """It has no host memory, and room for everything."""

    engine: Engine
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def response(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self.known:
            self.known[prompt] = run(self.engine, {"plain": prompt})["plain"]
        return self.known[prompt]


@dataclass
class Conversations:
    """Prompts that grow by the responses to them."""

    plain: PlainModel
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = [self.begun(number) for number in range(NUM_CONVERSATIONS)]

    def begun(self, number: int) -> tuple[int, ...]:
        shared = [index * 5 % 83 + 3 for index in range(SHARED_TOKENS)] if number % 2 else []
        return (*shared, *((index * 7 + number * 13) % 83 + 3 for index in range(90)))

    def grow(self, number: int, random: Random) -> None:
        prompt = self.prompts[number]
        longer = (*prompt, *self.plain.response(prompt), *random.choices(range(3, 86), k=random.randint(1, 40)))
        self.prompts[number] = longer if len(longer) + MAX_TOKENS < CONTEXT_TOKENS else self.begun(number)


def random_budget() -> int:
    return LateCopies.random.choice(BUDGETS[1:])


def run(
    engine: Engine,
    prompts: dict[str, tuple[int, ...]],
    cancelled: str = "",
    after: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    transfer: str = "",
) -> dict[str, list[int]]:
    """The greedy responses to concurrent requests; `cancelled` is cancelled after some steps, when `meanwhile` is
    called, too."""
    responses: dict[str, list[int]] = {name: [] for name in prompts}
    greedy = SamplingParams(temperature=0.0)
    for name, prompt in prompts.items():
        request = EngineRequest(name, prompt, MAX_TOKENS, greedy, checkpoint_at=(64, 100), transfer=transfer)
        engine.submit(request)
    steps = 0
    while engine.has_work:
        if steps == after:
            engine.cancel(cancelled)
            meanwhile()
        steps += 1
        for output in engine.step():
            responses[output.request_id] += output.tokens
    return responses


def load(family: str, host: DeviceHostMemory | None, seed: int = 0) -> Engine:
    chosen = FAMILIES[family]
    memory = None if host is None else chosen.memory_bytes
    spec = LoadSpec(
        path="",
        dtype="float32",
        max_num_seqs=4,
        prefill_chunk_tokens=64,
        context_tokens=CONTEXT_TOKENS,
        memory_bytes=memory,
        kv_dtype=chosen.kv_dtype,
    )
    engine = Engine(build_model(chosen.config, spec, CPU, filled(seed)), spec)
    if host is not None:
        engine.keep_pages(host)
    return engine


def any_end_of_front(first: int, end: int, *_: object) -> int:
    return LateCopies.random.randrange(first, end)


class History:
    """What happens to one model, in host memory that is verified."""

    def __init__(self, family: str, talks: Conversations, folder: Path | None = None) -> None:
        """`folder`: of the blocks on disk; None: there is no such tier."""
        self._folder = folder
        self.host = new_host(folder=folder)
        self._family = family
        self._talks = talks
        self.engine = load(family, self.host)
        self.num_fetched_tokens = 0

    def happen(self, event: str, random: Random) -> None:
        LateCopies.random = random
        match event:
            case "ask":
                self._ask(random)
            case "sleep":
                self.engine.sleep()
                wake(self.engine)
            case "swap":
                self._unload(self.engine)
                self.engine = load(self._family, self.host)
            case "other":
                other = load(self._family, self.host, seed=1)
                run(other, {"other": random.choice(self._talks.prompts)})
                self._unload(other)
            case "idle":
                for _ in range(random.randint(1, 4)):
                    self.engine.prepare()
            case "limit":
                self.host.store.limit(random.choice(BUDGETS))
            case "restart":
                self._unload(self.engine)
                self.host.settle()
                self._begin_again()
            case "kill":  # what was being written is lost, or is cut off
                self.num_fetched_tokens += self.engine.stats().fetched_tokens
                self._begin_again()
            case "damage":
                if (files := sorted(self._folder.rglob("*.kv"))) if self._folder is not None else ():
                    path = random.choice(files)
                    data = bytearray(path.read_bytes())
                    data[random.randrange(len(data))] ^= 1
                    path.write_bytes(data[: random.choice((len(data), random.randrange(len(data))))])
            case "forget":
                self._forget(random)
            case "shrink":
                self.host.store.shrink(random.randrange(self.host.store.num_bytes + 1))
        self.host.store.check_integrity()

    def _begin_again(self) -> None:
        self.host = new_host(random_budget(), folder=self._folder, disk_bytes=400_000)
        self.engine = load(self._family, self.host)

    def _ask(self, random: Random) -> None:
        numbers = random.sample(range(NUM_CONVERSATIONS), random.randint(1, 3))
        prompts = {f"request-{number}": self._talks.prompts[number] for number in numbers}
        cancelled = random.choice([*prompts, "", ""])
        asked = random.choice(self._talks.prompts)
        meanwhile = [lambda: None, lambda: self._offer(asked)]
        arrives = self._folder is not None and random.random() < 0.5
        if arrives:
            meanwhile = [self._hidden_files(random)]
        elif self._folder is not None:
            meanwhile.append(lambda: self._forget(random))
        after = random.randint(0, 4)
        responses = run(self.engine, prompts, cancelled, after, random.choice(meanwhile), transfer="t" * arrives)
        for number, (name, prompt) in zip(numbers, prompts.items(), strict=True):
            expected = self._talks.plain.response(prompt)
            if name == cancelled:
                assert responses[name] == expected[: len(responses[name])]
            else:
                assert responses[name] == expected
                self._talks.grow(number, random)

    def _hidden_files(self, random: Random) -> Callable[[], None]:
        """Nothing but some files is left; the others arrive when the result is called, as from another node."""
        disk = self.host.disk
        assert disk is not None
        assert self._folder is not None
        model = bytes.fromhex(self.engine.info.kv_name)
        self.engine.save_pages()
        self.host.settle()
        self.engine.forget_pages(lambda _: True)
        self.host.store.shrink(0)
        hidden = [path for path in sorted(self._folder.rglob("*.kv")) if random.random() < 0.7]
        for path in hidden:
            path.rename(path.with_suffix(".tmp"))
        disk.find_again(model)
        disk.transfers.add("t")

        def arrive() -> None:
            for path in hidden:
                if path.with_suffix(".tmp").exists():
                    path.with_suffix(".tmp").rename(path)
            disk.find_again(model)
            disk.transfers.clear()

        return arrive

    def _offer(self, prompt: tuple[int, ...]) -> None:
        """Another node asks for what was computed of a prompt."""
        digests, tier = page_digests(ROOT, prompt, 32), self.engine.tier
        assert tier is not None
        assert 0 <= tier.num_pages(digests) <= len(digests)
        tier.copy_these(digests, float("inf"))
        if self._folder is not None:
            self.host.save_these(bytes.fromhex(self.engine.info.kv_name), digests)

    def _forget(self, random: Random) -> None:
        some = {random.randrange(256) for _ in range(100)}
        self.engine.forget_pages(lambda digest: digest[-1] in some)
        self.engine.check_integrity()
        if random.randint(0, 1):
            self.engine.forget_pages(lambda _: True)
            self.host.forget(ChosenBlocks(), float("inf"))
            assert len(self.host.store) == 0

    def _unload(self, engine: Engine) -> None:
        self.num_fetched_tokens += engine.stats().fetched_tokens
        engine.save_pages()
        engine.check_integrity()
        engine.close()

    def end(self) -> None:
        self._unload(self.engine)
        self.host.settle()
        self.host.store.limit(0)
        assert self.host.store.num_bytes == 0, "no copy has been forgotten"


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, PlainModel]]:
    models = {family: PlainModel(load(family, None)) for family in FAMILIES}
    yield models
    for model in models.values():
        model.engine.close()


@pytest.mark.parametrize("family", FAMILIES)
@FEW
@hypothesis.given(events=HISTORIES)
def test_model_with_any_history_responds_as_one_without_host_memory(
    plain: dict[str, PlainModel], family: str, events: list[tuple[str, int]]
) -> None:
    history = History(family, Conversations(plain[family]))
    for event, seed in events:
        history.happen(event, Random(seed))
    history.end()


@pytest.mark.parametrize("family", FAMILIES)
@FEW
@hypothesis.given(events=DISK_HISTORIES)
def test_model_with_any_history_of_restarts_kills_and_damage_responds_as_one_without_a_disk(
    plain: dict[str, PlainModel], family: str, events: list[tuple[str, int]]
) -> None:
    with TemporaryDirectory() as folder:
        history = History(family, Conversations(plain[family]), Path(folder))
        for event, seed in events:
            history.happen(event, Random(seed))
        history.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_histories_reach_the_disk(plain: dict[str, PlainModel], family: str, tmp_path: Path, on_a_gpu: Reached) -> None:
    """Else they would show nothing."""
    history = History(family, Conversations(plain[family]), tmp_path)
    for seed in range(12):
        history.happen("ask", Random(seed))
        history.happen("restart", Random(seed))
        if history.num_fetched_tokens:
            break
    assert history.num_fetched_tokens > 0
    if family in ("hybrid", "windows"):
        assert on_a_gpu.num_shortened == 0, "they wait for all of the prefix"
    history.end()


def test_pages_that_are_overwritten_soon_come_back(plain: dict[str, PlainModel]) -> None:
    """Else the histories would show nothing."""
    history = History("dense", Conversations(plain["dense"]))
    for seed in range(6):
        history.happen("ask", Random(seed))
    history.end()
    assert history.num_fetched_tokens > 0
