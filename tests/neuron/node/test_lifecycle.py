"""The lifecycle as a table and as a property: whatever happens, in whatever order, nobody is left waiting."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.neuron.node.lifecycle import Lifecycle, transition
from cortex.neuron.node.lifecycle_events import (
    AbortLoad,
    Downloading,
    EnsureAsleep,
    EnsureGone,
    EnsureReady,
    FellAsleep,
    FilesReady,
    LoadingFailed,
    LoadSucceeded,
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
    UnloadFinished,
    UnloadInstead,
    WakingFailed,
)
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.wire.node import ModelState

POLICY = BackoffPolicy(first_delay_s=1.0, max_streak=2, max_faults=6)


def play(*inputs, life=None):
    """The state and all effects after `inputs`, one second apart."""
    life, effects = life or Lifecycle(), []
    for second, happened in enumerate(inputs):
        life, more = transition(life, happened, float(second), POLICY)
        effects.extend(more)
    return life, effects


READY = play(EnsureReady(), LoadSucceeded(1))[0]
ASLEEP = play(EnsureAsleep(), FellAsleep(2), life=READY)[0]


def test_the_straight_way_up():
    life, effects = play(EnsureReady(), Downloading(1), FilesReady(1), LoadSucceeded(1))
    assert life.state is ModelState.READY
    assert effects == [StartLoad(1), NotifyReady()]


def test_asking_twice_starts_one_load():
    life, effects = play(EnsureReady(), EnsureReady(), EnsureReady())
    assert life.state is ModelState.LOADING
    assert effects == [StartLoad(1)]


def test_asking_for_what_is_ready_answers_at_once():
    assert play(EnsureReady(), life=READY)[1] == [NotifyReady()]


def test_down_again():
    life, effects = play(EnsureGone(drain_s=5), UnloadFinished(2), life=READY)
    assert life.state is ModelState.COLD
    assert effects == [StartUnload(2, 5), NotifyGone()]


def test_gone_is_gone_already():
    assert play(EnsureGone())[1] == [NotifyGone()]


def test_a_failure_is_kept_until_asked_again_or_cleared():
    failed, effects = play(EnsureReady(), LoadingFailed(1, "bad files"))
    assert (failed.state, failed.reason) == (ModelState.FAILED, "bad files")
    assert effects[-1] == NotifyFailed("bad files")
    assert play(EnsureReady(), life=failed)[1] == [StartLoad(2)]
    assert play(EnsureGone(), life=failed)[0].state is ModelState.COLD


def test_unloading_while_loading_calls_it_off_and_tells_both_sides():
    life, effects = play(EnsureReady(), EnsureGone(), LoadingFailed(1, "called off"))
    assert life.state is ModelState.COLD
    assert isinstance(effects[1], NotifyFailed)
    assert effects[2:] == [AbortLoad(), NotifyGone()]


def test_called_off_too_late_it_is_taken_down():
    life, effects = play(EnsureReady(), EnsureGone(), LoadSucceeded(1), UnloadFinished(2))
    assert life.state is ModelState.COLD
    assert effects[-2:] == [StartUnload(2), NotifyGone()]


def test_asked_for_again_while_on_its_way_out_it_comes_back():
    life, effects = play(EnsureGone(), EnsureReady(), UnloadFinished(2), LoadSucceeded(3), life=READY)
    assert life.state is ModelState.READY
    assert effects == [StartUnload(2), NotifyGone(), StartLoad(3), NotifyReady()]


def test_a_second_unload_may_be_in_more_of_a_hurry():
    _, effects = play(EnsureGone(drain_s=60), EnsureGone(drain_s=0), life=READY)
    assert effects[-1] == ShortenDrain(0)


def test_a_lost_worker_is_recovered_from_then_given_up():
    life, effects = play(
        ModelLost("ECC"), LoadingFailed(2, "ECC", fault=True), LoadingFailed(3, "ECC", fault=True), life=READY
    )
    assert effects[:2] == [StartLoad(2, 0.0), StartLoad(3, 1.0)]
    assert life.state is ModelState.FAILED
    assert "given up after 3 faults" in life.reason
    assert isinstance(effects[-1], NotifyFailed)


def test_signs_of_life_reset_the_streak_but_not_the_window():
    life = READY
    for attempt in range(2, 8):
        life, effects = play(ProducedTokens(), ModelLost("killed"), LoadSucceeded(attempt), life=life)
        assert effects[0] == StartLoad(attempt, 0.0)
    assert play(ProducedTokens(), ModelLost("killed"), life=life)[0].state is ModelState.FAILED


def test_a_load_error_while_recovering_is_tried_again():
    life, effects = play(ModelLost("ECC"), LoadingFailed(2, "does not fit right now"), life=READY)
    assert life.state is ModelState.RECOVERING
    assert effects[-1] == StartLoad(3, 1.0)


def test_to_sleep_and_back():
    life, effects = play(
        EnsureAsleep(drain_s=5), FellAsleep(2), EnsureReady(), EnsureReady(), LoadSucceeded(3), life=READY
    )
    assert life.state is ModelState.READY
    assert effects == [StartUnload(2, 5, park=True), NotifyAsleep(), StartWake(3), NotifyReady()]


@pytest.mark.parametrize(
    ("before", "happened", "after", "effects"),
    [
        # asked to sleep
        ("ready", [EnsureAsleep(3)], ModelState.UNLOADING, [StartUnload(2, 3, park=True)]),
        ("asleep", [EnsureAsleep()], ModelState.ASLEEP, [NotifyAsleep()]),
        ("cold", [EnsureAsleep()], ModelState.COLD, [NotifyGone()]),
        ("failed", [EnsureAsleep()], ModelState.COLD, [NotifyGone()]),
        ("loading", [EnsureAsleep(), LoadingFailed(1, "called off")], ModelState.COLD, [AbortLoad(), NotifyGone()]),
        ("ready", [EnsureAsleep(9), EnsureAsleep(1)], ModelState.UNLOADING, [ShortenDrain(1)]),
        # no room for the weights: gone instead
        ("ready", [EnsureAsleep(), UnloadFinished(2)], ModelState.COLD, [NotifyGone()]),
        # changed minds
        ("ready", [EnsureAsleep(), EnsureReady(), FellAsleep(2)], ModelState.LOADING, [NotifyAsleep(), StartWake(3)]),
        ("ready", [EnsureAsleep(), EnsureReady(), UnloadFinished(2)], ModelState.LOADING, [NotifyGone(), StartLoad(3)]),
        ("ready", [EnsureAsleep(), EnsureGone()], ModelState.UNLOADING, [UnloadInstead(), ShortenDrain(0)]),
        ("ready", [EnsureGone(), EnsureAsleep(), UnloadFinished(2)], ModelState.COLD, [ShortenDrain(0), NotifyGone()]),
        # asleep
        ("asleep", [EnsureGone(7), UnloadFinished(3)], ModelState.COLD, [StartUnload(3, 7), NotifyGone()]),
        ("asleep", [EnsureReady()], ModelState.LOADING, [StartWake(3)]),
        ("asleep", [ModelLost("killed")], ModelState.COLD, []),
        # waking
        ("waking", [WakingFailed(3, "no room")], ModelState.ASLEEP, [NotifyFailed("no room")]),
        ("waking", [WakingFailed(3, "no room"), EnsureReady()], ModelState.LOADING, [StartWake(4)]),
        ("waking", [LoadingFailed(3, "killed", fault=True)], ModelState.RECOVERING, [StartLoad(4, 0.0)]),
        ("waking", [ModelLost("killed")], ModelState.LOADING, []),
        (
            "waking",
            [EnsureGone(), LoadSucceeded(3), UnloadFinished(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
        (
            "waking",
            [EnsureGone(), WakingFailed(3, "no"), UnloadFinished(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
        (
            "waking",
            [EnsureAsleep(), LoadSucceeded(3), UnloadFinished(4)],
            ModelState.COLD,
            [StartUnload(4), NotifyGone()],
        ),
    ],
)
def test_sleep_in_every_state(before, happened, after, effects):
    start = {
        "cold": Lifecycle(),
        "failed": play(EnsureReady(), LoadingFailed(1, "bad files"))[0],
        "loading": play(EnsureReady())[0],
        "ready": READY,
        "asleep": ASLEEP,
        "waking": play(EnsureReady(), life=ASLEEP)[0],
    }[before]
    life, told = play(*happened, life=start)
    assert life.state is after
    assert told[-len(effects) :] == effects if effects else told == []


def test_a_sleeper_whose_worker_died_says_why_it_is_cold():
    life, _ = play(ModelLost("killed by SIGKILL"), life=ASLEEP)
    assert "lost while it slept: killed by SIGKILL" in life.reason
    assert play(EnsureReady(), life=life)[1] == [StartLoad(3)]


@pytest.mark.parametrize(
    "stale",
    [
        LoadSucceeded(0),
        LoadingFailed(0, "old"),
        UnloadFinished(0),
        Downloading(0),
        ModelLost("old"),
        FellAsleep(0),
        WakingFailed(0, ""),
    ],
)
def test_what_an_older_attempt_reports_is_ignored(stale):
    loading = play(EnsureReady())[0]
    assert play(stale, life=loading) == (loading, [])


@dataclass
class World:
    """Carries effects out the way an owner does: one piece of work at a time, which ends in a known way."""

    life: Lifecycle = field(default_factory=Lifecycle)
    clock_s: float = 0.0
    work: object = None
    called_off: bool = False
    parks: bool = False
    ready_waiters: int = 0
    asleep_waiters: int = 0
    gone_waiters: int = 0
    held: str = "nothing"
    """`nothing`, `all` or `weights`, those in host memory."""

    def post(self, happened):
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
                    self.work, self.called_off = effect, False
                    self.parks = isinstance(effect, StartUnload) and effect.park
                case AbortLoad():
                    assert isinstance(self.work, StartLoad)
                    self.called_off = True
                case UnloadInstead():
                    self.parks = False
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

    def end_work(self, outcome):
        work, self.work = self.work, None
        match work:
            case StartUnload(attempt) if self.parks and outcome == "up" and self.held != "nothing":
                self.held = "weights"
                self.post(FellAsleep(attempt))
            case StartUnload(attempt):
                self.held = "nothing"
                self.post(UnloadFinished(attempt))
            case StartLoad(attempt) | StartWake(attempt) if outcome == "up" and (
                isinstance(work, StartLoad) or self.held == "weights"
            ):
                self.held = "all"
                self.post(LoadSucceeded(attempt))
            case StartWake(attempt) if outcome == "refused" and self.held == "weights":
                self.post(WakingFailed(attempt, outcome))
            case StartWake(attempt):
                self.held = "nothing"
                self.post(LoadingFailed(attempt, outcome, fault=True))
            case StartLoad(attempt):
                self.post(LoadingFailed(attempt, outcome, fault=outcome == "fault"))

    def lose(self):
        if self.held != "nothing":
            self.held = "nothing"
            self.post(ModelLost("killed"))


steps = st.lists(
    st.sampled_from(["ready", "gone", "asleep", "up", "refused", "fault", "lose", "prove", "downloading"]), max_size=40
)


@settings(max_examples=600)
@given(steps)
def test_whatever_happens_nobody_waits_for_ever_and_the_state_is_true(history):
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
                world.post(Downloading(world.life.attempt))
            case "downloading":
                pass
            case outcome:
                world.end_work(outcome)
    for _ in range(20):
        if world.work is None:
            break
        world.end_work("refused" if world.called_off else "up")
    assert world.work is None
    assert (world.ready_waiters, world.asleep_waiters, world.gone_waiters) == (0, 0, 0)
    held = {
        ModelState.READY: "all",
        ModelState.ASLEEP: "weights",
        ModelState.COLD: "nothing",
        ModelState.FAILED: "nothing",
    }
    assert world.held == held[world.life.state]
    assert world.life.parked == (world.life.state is ModelState.ASLEEP)
