"""The engine thread without a process: commands in, events out."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import faulty_engine
import pytest

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.request import EngineRequest, FinishReason, LoadSpec, StepOutput
from cortex.neuron.private_api.openmp import OPENMP
from cortex.neuron.worker.faults import DeviceFault, FaultKind
from cortex.neuron.worker.program.executor import PREPARE_AFTER_S, Executor
from cortex.neuron.worker.protocol import (
    Cancel,
    CancelLoad,
    Command,
    Compiled,
    DeviceAddress,
    Event,
    Exit,
    ExpectBlocks,
    FallbacksUsed,
    FollowStep,
    Load,
    Loaded,
    LoadProgress,
    ModelBroken,
    ModelLoadFailed,
    Outputs,
    RequestFailed,
    Submit,
    Unload,
    Unloaded,
)

from ....waiting import WAIT_S
from ...failed_probes import REASON, fail_probe

BENCH = Path(__file__).parents[4] / "bench"
Batch = list[Command | FollowStep | Compiled]
Prepare = Callable[[faulty_engine.FaultyEngine], bool]
E = TypeVar("E", bound=Event)


class Turns(queue.SimpleQueue[Batch]):
    """An inbox that returns one batch per iteration of the engine thread, so that a test needs no second thread."""

    def __init__(self, executor: Executor, batches: Sequence[Batch]) -> None:
        super().__init__()
        self._executor = executor
        self._batches = list(batches)
        self._given = False

    def get(self, block: bool = True, timeout: float | None = None) -> Batch:
        self._given = True
        return self._batches.pop(0)

    def get_nowait(self) -> Batch:
        self._given = not self._given
        if not self._given or self._executor.activity == "load":
            raise queue.Empty
        return self._batches.pop(0)


def run(*turns: Batch, engine: str = "faulty_engine:load") -> list[Event]:
    """All events of an executor that gets one batch of commands per iteration and then exits."""
    events: list[Event] = []
    executor = Executor(DeviceAddress("cpu", 0), engine, events.append)
    for command in itertools.chain(*turns):
        if isinstance(command, CancelLoad):
            executor.cancel_load(command.handle)
    executor.inbox = Turns(executor, [*turns, [Exit()]])
    executor.run()
    return events


def load(handle: int) -> Load:
    return Load(handle, LoadSpec(path="nowhere"))


def submit(handle: int, request_id: str, token: int = faulty_engine.PLAIN) -> Submit:
    return Submit.of(handle, EngineRequest(id=request_id, prompt=(token,), max_tokens=2))


def kinds(events: Iterable[Event]) -> list[type[Event]]:
    return [type(event) for event in events if not isinstance(event, LoadProgress)]


def test_executes_commands_in_order() -> None:
    assert kinds(run([load(1), Unload(1)])) == [Loaded, Unloaded]


def test_reports_what_of_the_libraries_cannot_be_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, OPENMP)
    (used,) = [event for event in run([load(1)], [], [Unload(1)]) if isinstance(event, FallbacksUsed)]
    assert used.reasons == {OPENMP.name: f"{REASON}; instead: {OPENMP.fallback}"}


@pytest.mark.parametrize(("turns", "expected"), [([[load(1)], []], 0), ([[load(1)], [submit(1, "r")], *[[]] * 8], 1)])
def test_writer_gets_time_for_the_last_outputs_only(
    turns: list[Batch], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that follows others would wait after each of their steps."""
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("cortex.neuron.worker.program.executor.time", clock)  # engines sleep too
    run(*turns)
    assert len(pauses) == expected


@pytest.mark.parametrize("engine", ["scripted_engine", "modelled_device"])
def test_engines_of_benchmarks_are_loaded_as_others_are(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("SCRIPTED_STEP_MS", "0")
    monkeypatch.setenv("MODELLED_SLOWDOWN", "0")
    events = run([load(1)], [submit(1, "a")], [], [], [], [Unload(1)], engine=f"{engine}:load")
    assert [kind for kind in kinds(events) if kind is not Outputs] == [Loaded, Unloaded]
    outputs = [output for event in events if isinstance(event, Outputs) for output in event.outputs]
    assert sum(len(output.tokens) for output in outputs) == 2
    assert outputs[-1].finish == "length"


def test_request_for_an_unloaded_model_fails() -> None:
    events = run([load(1), Unload(1), submit(1, "late")])
    assert [event.request_id for event in events if isinstance(event, RequestFailed)] == ["late"]


def test_load_that_was_cancelled_in_the_queue_does_not_start() -> None:
    first, *_ = events = run([load(1), CancelLoad(1)], [load(1)])
    assert kinds(events) == [ModelLoadFailed, Loaded]
    assert isinstance(first, ModelLoadFailed)
    assert first.cancelled


def test_cancellation_of_a_load_that_has_ended_is_ignored() -> None:
    assert kinds(run([CancelLoad(7)], [load(7)])) == [Loaded]


def test_blocks_are_expected_until_their_transfer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(transfers=set())
    store = SimpleNamespace(limit=lambda _: None, num_bytes=0)
    host = SimpleNamespace(disk=disk, store=store, kept=dict)
    monkeypatch.setattr(faulty_engine.FaultyEngine, "keep_pages", lambda *_: host)
    ended: Batch = [ExpectBlocks("a", has_ended=True), ExpectBlocks("lost", has_ended=True)]
    run([load(1)], [], [ExpectBlocks("a"), ExpectBlocks("b"), *ended])
    assert disk.transfers == {"b"}


def test_device_fault_in_a_step_ends_the_thread() -> None:
    with pytest.raises(DeviceFault, match="device fault in step: RuntimeError: CUDA error"):
        run([load(1)], [submit(1, "fatal", faulty_engine.DEVICE_FAULT)], [], [])


class Pauses(Turns):
    """Reports a timeout of every timed wait before it returns a batch."""

    def get(self, block: bool = True, timeout: float | None = None) -> Batch:
        if timeout is not None and self._batches != [[Exit()]]:
            self._given = False
            raise queue.Empty
        return super().get()


def run_with_pauses(monkeypatch: pytest.MonkeyPatch, prepare: Prepare, *turns: Batch) -> list[Event]:
    """All events, with `prepare` as the engines' method."""
    monkeypatch.setattr(faulty_engine.FaultyEngine, "prepare", prepare)
    events: list[Event] = []
    executor = Executor(DeviceAddress("cpu", 0), "faulty_engine:load", events.append)
    executor.inbox = Pauses(executor, [*turns, [Exit()]])
    executor.run()
    return events


def test_idle_model_prepares_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter([True, True, True, False])
    prepared_while_busy = []

    def prepare(engine: faulty_engine.FaultyEngine) -> bool:
        prepared_while_busy.append(engine.has_work)
        return next(pieces)

    events = run_with_pauses(monkeypatch, prepare, [load(1)], [submit(1, "a")], [])
    assert prepared_while_busy == [False] * 4
    assert any(isinstance(event, Outputs) for event in events)


def test_waits_for_idleness_once_and_not_before_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = iter([True, True, False])
    waits_s: list[float | None] = []

    class Silence(Pauses):
        def get(self, block: bool = True, timeout: float | None = None) -> Batch:
            waits_s.append(timeout)
            return super().get(block, timeout)

    monkeypatch.setattr(faulty_engine.FaultyEngine, "prepare", lambda _engine: next(pieces))
    executor = Executor(DeviceAddress("cpu", 0), "faulty_engine:load", lambda event: None)
    executor.inbox = Silence(executor, [[load(1)], [], [Exit()]])
    executor.run()
    assert [wait_s for wait_s in waits_s if wait_s is not None] == [PREPARE_AFTER_S, 0.0, 0.0]


def test_does_not_prepare_while_commands_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_engine: faulty_engine.FaultyEngine) -> bool:
        pytest.fail("prepared while commands were pending")

    monkeypatch.setattr(faulty_engine.FaultyEngine, "prepare", prepare)
    assert kinds(run([load(1)], [submit(1, "a")], [], [])).count(Outputs) > 0


def test_model_that_fails_to_prepare_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_engine: faulty_engine.FaultyEngine) -> bool:
        raise ValueError("a kernel that does not compile")

    events = run_with_pauses(monkeypatch, prepare, [load(1)], [submit(1, "a")], [])
    assert any(isinstance(event, Outputs) for event in events)


def test_device_fault_while_preparing_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_engine: faulty_engine.FaultyEngine) -> bool:
        faulty_engine.misbehave(faulty_engine.DEVICE_FAULT)
        return False

    with pytest.raises(DeviceFault, match="device fault in prepare"):
        run_with_pauses(monkeypatch, prepare, [load(1)], [submit(1, "a")])


def test_models_know_whether_others_had_work_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bool]] = {}
    step = faulty_engine.FaultyEngine.step

    def recorded(engine: faulty_engine.FaultyEngine) -> list[StepOutput]:
        outputs = step(engine)
        for output in outputs:
            seen.setdefault(output.request_id, set()).add(engine.shares_device)
        return outputs

    monkeypatch.setattr(faulty_engine.FaultyEngine, "step", recorded)
    both: Batch = [submit(1, "with"), submit(2, "other")]
    run([load(1)], [load(2)], [submit(1, "alone")], [], both, [], [submit(1, "after")], [])
    assert seen == {"alone": {False}, "with": {True}, "other": {True}, "after": {True}}


def test_model_whose_steps_keep_failing_is_closed_alone() -> None:
    loads: Batch = [Load(1, LoadSpec(path="broken")), load(2)]
    events = run(loads, [submit(1, "a"), submit(2, "b")], *([[]] * 6), engine="faulty_engine:load_broken")
    assert [event.handle for event in events if isinstance(event, ModelBroken)] == [1]
    assert [event.request_id for event in events if isinstance(event, RequestFailed)] == ["a"]
    assert any(isinstance(event, Outputs) and event.handle == 2 for event in events)


def test_bug_ends_only_the_request_that_causes_it_however_often() -> None:
    bugs = [f"bug {number}" for number in range(5)]
    turns: list[Batch] = [[submit(1, bug, faulty_engine.BUG)] for bug in bugs]
    long = Submit.of(1, EngineRequest(id="long", prompt=(faulty_engine.PLAIN,), max_tokens=6))
    events = run([load(1)], [long], *(turn for each in turns for turn in (each, [], [])), *([[]] * 6))
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert [(event.request_id, event.kind) for event in failed] == [(bug, FaultKind.BUG) for bug in bugs]
    outputs = [output for event in events if isinstance(event, Outputs) for output in event.outputs]
    assert [output.finish for output in outputs if output.request_id == "long"] == [None] * 5 + ["length"]
    assert not any(isinstance(event, ModelBroken) for event in events)


def test_bugs_of_single_requests_do_not_break_the_model() -> None:
    turns: list[Batch] = []
    for number in range(5):
        turns += [[submit(1, f"bug {number}", faulty_engine.BUG)], [], []]
    events = run([load(1)], *turns, [submit(1, "well")], [], [])
    assert sum(isinstance(event, RequestFailed) for event in events) == 5
    assert not any(isinstance(event, ModelBroken) for event in events)
    assert isinstance(events[-1], Outputs)
    assert events[-1].outputs[-1].finish == "length"


class Grammars:
    """An executor on a thread of its own, and an engine that compiles a grammar when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.compiling, self.may_compile = threading.Event(), threading.Event()
        self.executor = Executor(DeviceAddress("cpu", 0), "faulty_engine:load", self.events.put)

        def compile(_engine: faulty_engine.FaultyEngine, grammar: str, _tenant: bytes) -> None:
            self.compiling.set()
            assert self.may_compile.wait(WAIT_S)
            if grammar == "bad":
                raise RequestError("the grammar does not compile")

        monkeypatch.setattr(faulty_engine.FaultyEngine, "compile", compile, raising=False)
        self.thread = threading.Thread(target=self.executor.run)
        self.thread.start()
        self.executor.inbox.put([load(1)])
        self.until(Loaded)

    def submit(self, request_id: str, grammar: str | None) -> None:
        self.executor.inbox.put([Submit.of(1, EngineRequest(request_id, (1,), max_tokens=2, grammar=grammar))])
        if grammar is not None:
            assert self.compiling.wait(WAIT_S)

    def until(self, kind: type[E]) -> E:
        while not isinstance(event := self.events.get(timeout=WAIT_S), kind):
            pass
        return event

    def end(self) -> None:
        self.may_compile.set()
        self.executor.inbox.put([Exit()])
        self.thread.join(WAIT_S)


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    started = Grammars(monkeypatch)
    yield started
    started.end()


def ended(outputs: Outputs) -> list[tuple[str, FinishReason]]:
    return [(output.request_id, output.finish) for output in outputs.outputs if output.finish is not None]


def test_streams_go_on_while_a_grammar_is_compiled(grammars: Grammars) -> None:
    grammars.submit("constrained", "slow")
    grammars.submit("plain", None)
    while not (finished := ended(grammars.until(Outputs))):
        pass
    assert finished == [("plain", "length")]
    grammars.may_compile.set()
    while not (finished := ended(grammars.until(Outputs))):
        pass
    assert finished == [("constrained", "length")]


def test_grammar_that_does_not_compile_fails_its_request(grammars: Grammars) -> None:
    grammars.submit("constrained", "bad")
    grammars.may_compile.set()
    failed = grammars.until(RequestFailed)
    assert (failed.request_id, failed.message) == ("constrained", "the grammar does not compile")


def test_request_can_be_cancelled_while_its_grammar_is_compiled(grammars: Grammars) -> None:
    grammars.submit("constrained", "slow")
    grammars.executor.inbox.put([Cancel(1, "constrained")])
    assert ended(grammars.until(Outputs)) == [("constrained", "cancelled")]
    grammars.may_compile.set()
    grammars.submit("plain", None)
    while not (finished := ended(grammars.until(Outputs))):
        pass
    assert finished == [("plain", "length")]


def test_unload_ends_requests_whose_grammar_is_compiled(grammars: Grammars) -> None:
    grammars.submit("constrained", "slow")
    grammars.executor.inbox.put([Unload(1)])
    assert grammars.until(RequestFailed).request_id == "constrained"
    grammars.until(Unloaded)
