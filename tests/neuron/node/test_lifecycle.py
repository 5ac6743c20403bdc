"""The lifecycle as a table and as a property: after any history, no caller waits forever."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.node.lifecycle import (
    FAILURE_S,
    DownloadStarted,
    Effect,
    EnsureAsleep,
    EnsureGone,
    EnsureReady,
    FilesReady,
    Input,
    Lifecycle,
    LoadEnded,
    ModelLost,
    NotifyAsleep,
    NotifyFailed,
    NotifyGone,
    NotifyReady,
    ProducedTokens,
    ShortenDrain,
    StartLoad,
    StartUnload,
    StartWake,
    StopLoad,
    UnloadEnded,
    UnloadInstead,
    transition,
)
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.protocol import ModelState

from ...examples import MANY

POLICY = BackoffPolicy(first_delay_s=1.0, max_streak=2, max_faults=6)
BAD_FILES = LoadFailed("bad files")
NO_ROOM = InsufficientCapacity("no room")
LOST = LoadFailed("the worker was killed")


def play(*inputs: Input, life: Lifecycle | None = None) -> tuple[Lifecycle, list[Effect]]:
    """The state and all effects after `inputs`, one second apart."""
    life = life or Lifecycle()
    effects: list[Effect] = []
    for second, happened in enumerate(inputs):
        life, more = transition(life, happened, float(second), POLICY)
        effects.extend(more)
    return life, effects


READY = play(EnsureReady(), LoadEnded(1))[0]
ASLEEP = play(EnsureAsleep(), UnloadEnded(2, asleep=True), life=READY)[0]


def test_loads_a_cold_model() -> None:
    life, effects = play(EnsureReady(), DownloadStarted(1), FilesReady(1), LoadEnded(1))
    assert life.state is ModelState.READY
    assert effects == [StartLoad(1), NotifyReady()]


def test_starts_one_load_for_many_callers() -> None:
    life, effects = play(EnsureReady(), EnsureReady(), EnsureReady())
    assert life.state is ModelState.LOADING
    assert effects == [StartLoad(1)]


def test_notifies_at_once_when_the_model_is_ready() -> None:
    assert play(EnsureReady(), life=READY)[1] == [NotifyReady()]


def test_unloads_a_ready_model() -> None:
    life, effects = play(EnsureGone(drain_s=5), UnloadEnded(2), life=READY)
    assert life.state is ModelState.COLD
    assert effects == [StartUnload(2, 5), NotifyGone()]


def test_notifies_at_once_when_the_model_is_cold() -> None:
    assert play(EnsureGone())[1] == [NotifyGone()]


def test_stays_failed_until_loaded_again_or_unloaded() -> None:
    failed, effects = play(EnsureReady(), LoadEnded(1, BAD_FILES))
    assert (failed.state, failed.reason) == (ModelState.FAILED, "bad files")
    assert effects[-1] == NotifyFailed(BAD_FILES)
    assert play(EnsureReady(), life=failed)[1] == [StartLoad(2)]
    assert play(EnsureGone(), life=failed)[0].state is ModelState.COLD


def test_failure_is_reported_for_a_while_and_its_reason_stays() -> None:
    failed, _ = play(EnsureReady(), LoadEnded(1, BAD_FILES))
    over_at = failed.since_s + FAILURE_S
    assert [failed.reported_state(now) for now in (over_at - 1, over_at)] == [ModelState.FAILED, ModelState.COLD]
    assert failed.reason == "bad files"
    assert READY.reported_state(over_at) is ModelState.READY


def test_model_that_is_unloaded_to_be_loaded_again_is_reported_as_loading() -> None:
    """Its memory is not for others."""
    leaving, _ = play(EnsureReady(), LoadEnded(1), EnsureGone())
    assert leaving.reported_state(leaving.since_s) is ModelState.UNLOADING
    again, _ = play(EnsureReady(), LoadEnded(1), EnsureGone(), EnsureReady())
    assert (again.state, again.reported_state(again.since_s)) == (ModelState.UNLOADING, ModelState.LOADING)


def test_unload_during_a_load_cancels_it_and_notifies_both_callers() -> None:
    life, effects = play(EnsureReady(), EnsureGone(), LoadEnded(1, BAD_FILES))
    assert life.state is ModelState.COLD
    assert isinstance(effects[1], NotifyFailed)
    assert effects[2:] == [StopLoad(), NotifyGone()]


def test_unloads_a_model_whose_load_was_cancelled_too_late() -> None:
    life, effects = play(EnsureReady(), EnsureGone(), LoadEnded(1), UnloadEnded(2))
    assert life.state is ModelState.COLD
    assert effects[-2:] == [StartUnload(2), NotifyGone()]


def test_loads_again_after_an_unload_when_a_caller_wants_it_meanwhile() -> None:
    life, effects = play(EnsureGone(), EnsureReady(), UnloadEnded(2), LoadEnded(3), life=READY)
    assert life.state is ModelState.READY
    assert effects == [StartUnload(2), NotifyGone(), StartLoad(3), NotifyReady()]


def test_second_unload_shortens_the_drain() -> None:
    _, effects = play(EnsureGone(drain_s=60), EnsureGone(drain_s=0), life=READY)
    assert effects[-1] == ShortenDrain(0)


def test_recovers_from_a_lost_worker_and_gives_up_after_the_streak() -> None:
    life, effects = play(
        ModelLost("ECC"), LoadEnded(2, LOST, worker_lost=True), LoadEnded(3, LOST, worker_lost=True), life=READY
    )
    assert effects[:2] == [StartLoad(2, 0.0), StartLoad(3, 1.0)]
    assert life.state is ModelState.FAILED
    assert "gave up after 3 faults" in (life.reason or "")
    assert isinstance(effects[-1], NotifyFailed)


def test_produced_tokens_reset_the_streak_but_not_the_window() -> None:
    life = READY
    for attempt in range(2, 8):
        life, effects = play(ProducedTokens(), ModelLost("killed"), LoadEnded(attempt), life=life)
        assert effects[0] == StartLoad(attempt, 0.0)
    assert play(ProducedTokens(), ModelLost("killed"), life=life)[0].state is ModelState.FAILED


def test_retries_after_a_load_error_while_recovering() -> None:
    life, effects = play(ModelLost("ECC"), LoadEnded(2, NO_ROOM), life=READY)
    assert life.state is ModelState.RECOVERING
    assert effects[-1] == StartLoad(3, 1.0)


def test_falls_asleep_and_wakes_once_for_many_callers() -> None:
    life, effects = play(
        EnsureAsleep(drain_s=5), UnloadEnded(2, asleep=True), EnsureReady(), EnsureReady(), LoadEnded(3), life=READY
    )
    assert life.state is ModelState.READY
    assert effects == [StartUnload(2, 5, to_sleep=True), NotifyAsleep(), StartWake(3), NotifyReady()]


@pytest.mark.parametrize(
    ("before", "happened", "after", "effects"),
    [
        # EnsureAsleep
        ("ready", [EnsureAsleep(3)], ModelState.UNLOADING, [StartUnload(2, 3, to_sleep=True)]),
        ("asleep", [EnsureAsleep()], ModelState.ASLEEP, [NotifyAsleep()]),
        ("cold", [EnsureAsleep()], ModelState.COLD, [NotifyGone()]),
        ("failed", [EnsureAsleep()], ModelState.COLD, [NotifyGone()]),
        ("loading", [EnsureAsleep(), LoadEnded(1, BAD_FILES)], ModelState.COLD, [StopLoad(), NotifyGone()]),
        ("ready", [EnsureAsleep(9), EnsureAsleep(1)], ModelState.UNLOADING, [ShortenDrain(1)]),
        # no room for the weights: unloaded instead
        ("ready", [EnsureAsleep(), UnloadEnded(2)], ModelState.COLD, [NotifyGone()]),
        # another wish during the unload
        (
            "ready",
            [EnsureAsleep(), EnsureReady(), UnloadEnded(2, asleep=True)],
            ModelState.LOADING,
            [NotifyAsleep(), StartWake(3)],
        ),
        ("ready", [EnsureAsleep(), EnsureReady(), UnloadEnded(2)], ModelState.LOADING, [NotifyGone(), StartLoad(3)]),
        ("ready", [EnsureAsleep(), EnsureGone()], ModelState.UNLOADING, [UnloadInstead(), ShortenDrain(0)]),
        ("ready", [EnsureGone(), EnsureAsleep(), UnloadEnded(2)], ModelState.COLD, [ShortenDrain(0), NotifyGone()]),
        # asleep
        ("asleep", [EnsureGone(7), UnloadEnded(3)], ModelState.COLD, [StartUnload(3, 7), NotifyGone()]),
        ("asleep", [EnsureReady()], ModelState.LOADING, [StartWake(3)]),
        ("asleep", [ModelLost("killed")], ModelState.COLD, []),
        # waking
        ("waking", [LoadEnded(3, NO_ROOM)], ModelState.ASLEEP, [NotifyFailed(NO_ROOM)]),
        ("waking", [LoadEnded(3, NO_ROOM), EnsureReady()], ModelState.LOADING, [StartWake(4)]),
        ("waking", [LoadEnded(3, LOST, worker_lost=True)], ModelState.RECOVERING, [StartLoad(4, 0.0)]),
        ("waking", [LoadEnded(3, LOST, worker_lost=True, restarts=False)], ModelState.FAILED, [NotifyFailed(LOST)]),
        ("waking", [ModelLost("killed")], ModelState.LOADING, []),
        (
            "waking",
            [LoadEnded(3, NO_ROOM, has_room_elsewhere=True), UnloadEnded(4)],
            ModelState.LOADING,
            [StartUnload(4), NotifyGone(), StartLoad(5)],
        ),
        (
            "waking",
            [EnsureGone(), LoadEnded(3, NO_ROOM, has_room_elsewhere=True), UnloadEnded(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
        (
            "waking",
            [EnsureGone(), LoadEnded(3), UnloadEnded(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
        (
            "waking",
            [EnsureGone(), LoadEnded(3, NO_ROOM), UnloadEnded(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
        (
            "waking",
            [EnsureAsleep(), LoadEnded(3), UnloadEnded(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
    ],
)
def test_handles_sleep_in_every_state(
    before: str, happened: list[Input], after: ModelState, effects: list[Effect]
) -> None:
    start = {
        "cold": Lifecycle(),
        "failed": play(EnsureReady(), LoadEnded(1, BAD_FILES))[0],
        "loading": play(EnsureReady())[0],
        "ready": READY,
        "asleep": ASLEEP,
        "waking": play(EnsureReady(), life=ASLEEP)[0],
    }[before]
    life, done = play(*happened, life=start)
    assert life.state is after
    assert done[-len(effects) :] == effects if effects else done == []


def test_gives_the_reason_when_a_sleeping_model_was_lost() -> None:
    life, _ = play(ModelLost("killed by SIGKILL"), life=ASLEEP)
    assert "lost while it slept: killed by SIGKILL" in (life.reason or "")
    assert play(EnsureReady(), life=life)[1] == [StartLoad(3)]


@pytest.mark.parametrize(
    "stale",
    [
        LoadEnded(0),
        LoadEnded(0, BAD_FILES),
        UnloadEnded(0),
        DownloadStarted(0),
        ModelLost("old"),
        UnloadEnded(0, asleep=True),
        LoadEnded(0, NO_ROOM),
    ],
)
def test_ignores_inputs_from_older_attempts(stale: Input) -> None:
    loading = play(EnsureReady())[0]
    assert play(stale, life=loading) == (loading, [])


@dataclass
class World:
    """Carries out effects the way a controller does: one load, wake or unload at a time, with a known end."""

    life: Lifecycle = field(default_factory=Lifecycle)
    clock_s: float = 0.0
    work: StartLoad | StartUnload | StartWake | None = None
    is_cancelled: bool = False
    to_sleep: bool = False
    ready_waiters: int = 0
    asleep_waiters: int = 0
    gone_waiters: int = 0
    held: str = "nothing"
    """`nothing`, `all` or `weights`, those in host memory."""

    def post(self, happened: Input) -> None:
        self.clock_s += 1
        self.ready_waiters += isinstance(happened, EnsureReady)
        self.asleep_waiters += isinstance(happened, EnsureAsleep)
        self.gone_waiters += isinstance(happened, EnsureGone)
        self.life, effects = transition(self.life, happened, self.clock_s, POLICY)
        for effect in effects:
            match effect:
                case StartLoad() | StartUnload() | StartWake():
                    assert self.work is None, "two pieces of work at once"
                    assert isinstance(effect, StartUnload) or self.held == (
                        "weights" if isinstance(effect, StartWake) else "nothing"
                    )
                    self.work, self.is_cancelled = effect, False
                    self.to_sleep = isinstance(effect, StartUnload) and effect.to_sleep
                case StopLoad():
                    assert isinstance(self.work, StartLoad)
                    self.is_cancelled = True
                case UnloadInstead():
                    self.to_sleep = False
                case NotifyReady():
                    assert self.held == "all"
                    self.ready_waiters = 0
                case NotifyFailed():
                    self.ready_waiters = 0
                case NotifyAsleep():
                    assert self.held == "weights"
                    self.asleep_waiters = 0
                case NotifyGone():
                    assert self.held == "nothing"
                    self.gone_waiters = self.asleep_waiters = 0

    def end_work(self, outcome: str) -> None:
        work, self.work = self.work, None
        match work:
            case StartUnload(attempt) if self.to_sleep and outcome == "up" and self.held != "nothing":
                self.held = "weights"
                self.post(UnloadEnded(attempt, asleep=True))
            case StartUnload(attempt):
                self.held = "nothing"
                self.post(UnloadEnded(attempt))
            case StartLoad(attempt) | StartWake(attempt) if outcome == "up" and (
                isinstance(work, StartLoad) or self.held == "weights"
            ):
                self.held = "all"
                self.post(LoadEnded(attempt))
            case StartWake(attempt) if outcome in ("refused", "moves") and self.held == "weights":
                self.post(LoadEnded(attempt, NO_ROOM, has_room_elsewhere=outcome == "moves"))
            case StartWake(attempt):
                self.held = "nothing"
                self.post(LoadEnded(attempt, LOST, worker_lost=True))
            case StartLoad(attempt):
                self.post(LoadEnded(attempt, BAD_FILES, worker_lost=outcome == "fault"))

    def lose(self) -> None:
        if self.held != "nothing":
            self.held = "nothing"
            self.post(ModelLost("killed"))


steps = st.lists(
    st.sampled_from(["ready", "gone", "asleep", "up", "refused", "moves", "fault", "lose", "prove", "downloading"]),
    max_size=40,
)


@MANY
@given(steps)
def test_no_caller_waits_forever_and_the_state_matches_the_memory_after_any_history(history: list[str]) -> None:
    world = World()
    for step in history:
        match step:
            case "ready":
                world.post(EnsureReady())
            case "gone":
                world.post(EnsureGone())
            case "asleep":
                world.post(EnsureAsleep())
            case "lose":
                world.lose()
            case "prove":
                world.post(ProducedTokens())
            case "downloading" if isinstance(world.work, StartLoad):
                world.post(DownloadStarted(world.life.attempt))
            case "downloading":
                pass
            case outcome:
                world.end_work(outcome)
    for _ in range(20):
        if world.work is None:
            break
        world.end_work("refused" if world.is_cancelled else "up")
    assert world.work is None
    assert (world.ready_waiters, world.asleep_waiters, world.gone_waiters) == (0, 0, 0)
    held = {
        ModelState.READY: "all",
        ModelState.ASLEEP: "weights",
        ModelState.COLD: "nothing",
        ModelState.FAILED: "nothing",
    }
    assert world.held == held[world.life.state]
    assert world.life.weights_in_host == (world.life.state is ModelState.ASLEEP)
