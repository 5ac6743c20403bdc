"""The lifecycle as a table and as a property: whatever happens, in whatever order, nobody is left waiting."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.neuron.device.backoff import BackoffPolicy
from cortex.neuron.node.lifecycle import (
    BringUp,
    BringUpFailed,
    BroughtUp,
    CallOff,
    Downloading,
    EnsureGone,
    EnsureReady,
    FailReady,
    FilesAtHand,
    HurryDrain,
    Lifecycle,
    Lost,
    Proved,
    TakeDown,
    TookDown,
    WakeGone,
    WakeReady,
    transition,
)
from cortex.wire.node import ModelState

POLICY = BackoffPolicy(first_delay_s=1.0, max_streak=2, max_faults=6)


def play(*inputs, life=None):
    """The state and all effects after `inputs`, one second apart."""
    life, effects = life or Lifecycle(), []
    for second, happened in enumerate(inputs):
        life, more = transition(life, happened, float(second), POLICY)
        effects.extend(more)
    return life, effects


READY = play(EnsureReady(), BroughtUp(1))[0]


def test_the_straight_way_up():
    life, effects = play(EnsureReady(), Downloading(1), FilesAtHand(1), BroughtUp(1))
    assert life.state is ModelState.READY
    assert effects == [BringUp(1), WakeReady()]


def test_asking_twice_starts_one_load():
    life, effects = play(EnsureReady(), EnsureReady(), EnsureReady())
    assert life.state is ModelState.LOADING
    assert effects == [BringUp(1)]


def test_asking_for_what_is_ready_answers_at_once():
    assert play(EnsureReady(), life=READY)[1] == [WakeReady()]


def test_down_again():
    life, effects = play(EnsureGone(drain_s=5), TookDown(2), life=READY)
    assert life.state is ModelState.COLD
    assert effects == [TakeDown(2, 5), WakeGone()]


def test_gone_is_gone_already():
    assert play(EnsureGone())[1] == [WakeGone()]


def test_a_failure_is_kept_until_asked_again_or_cleared():
    failed, effects = play(EnsureReady(), BringUpFailed(1, "bad files"))
    assert (failed.state, failed.reason) == (ModelState.FAILED, "bad files")
    assert effects[-1] == FailReady("bad files")
    assert play(EnsureReady(), life=failed)[1] == [BringUp(2)]
    assert play(EnsureGone(), life=failed)[0].state is ModelState.COLD


def test_unloading_while_loading_calls_it_off_and_tells_both_sides():
    life, effects = play(EnsureReady(), EnsureGone(), BringUpFailed(1, "called off"))
    assert life.state is ModelState.COLD
    assert isinstance(effects[1], FailReady)
    assert effects[2:] == [CallOff(), WakeGone()]


def test_called_off_too_late_it_is_taken_down():
    life, effects = play(EnsureReady(), EnsureGone(), BroughtUp(1), TookDown(2))
    assert life.state is ModelState.COLD
    assert effects[-2:] == [TakeDown(2), WakeGone()]


def test_asked_for_again_while_on_its_way_out_it_comes_back():
    life, effects = play(EnsureGone(), EnsureReady(), TookDown(2), BroughtUp(3), life=READY)
    assert life.state is ModelState.READY
    assert effects == [TakeDown(2), WakeGone(), BringUp(3), WakeReady()]


def test_a_second_unload_may_be_in_more_of_a_hurry():
    _, effects = play(EnsureGone(drain_s=60), EnsureGone(drain_s=0), life=READY)
    assert effects[-1] == HurryDrain(0)


def test_a_lost_worker_is_recovered_from_then_given_up():
    life, effects = play(
        Lost("ECC"), BringUpFailed(2, "ECC", fault=True), BringUpFailed(3, "ECC", fault=True), life=READY
    )
    assert effects[:2] == [BringUp(2, 0.0), BringUp(3, 1.0)]
    assert life.state is ModelState.FAILED
    assert "given up after 3 faults" in life.reason
    assert isinstance(effects[-1], FailReady)


def test_signs_of_life_reset_the_streak_but_not_the_window():
    life = READY
    for attempt in range(2, 8):
        life, effects = play(Proved(), Lost("killed"), BroughtUp(attempt), life=life)
        assert effects[0] == BringUp(attempt, 0.0)
    assert play(Proved(), Lost("killed"), life=life)[0].state is ModelState.FAILED


def test_a_load_error_while_recovering_is_tried_again():
    life, effects = play(Lost("ECC"), BringUpFailed(2, "does not fit right now"), life=READY)
    assert life.state is ModelState.RECOVERING
    assert effects[-1] == BringUp(3, 1.0)


@pytest.mark.parametrize("stale", [BroughtUp(0), BringUpFailed(0, "old"), TookDown(0), Downloading(0), Lost("old")])
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
    ready_waiters: int = 0
    gone_waiters: int = 0
    loaded: bool = False

    def post(self, happened):
        self.clock_s += 1
        if isinstance(happened, EnsureReady):
            self.ready_waiters += 1
        if isinstance(happened, EnsureGone):
            self.gone_waiters += 1
        self.life, effects = transition(self.life, happened, self.clock_s, POLICY)
        for effect in effects:
            match effect:
                case BringUp() | TakeDown():
                    assert self.work is None, "two pieces of work at once"
                    self.work, self.called_off = effect, False
                case CallOff():
                    self.called_off = True
                case WakeReady() | FailReady():
                    self.ready_waiters = 0
                case WakeGone():
                    self.gone_waiters = 0

    def end_work(self, outcome):
        work, self.work = self.work, None
        match work:
            case TakeDown(attempt):
                self.loaded = False
                self.post(TookDown(attempt))
            case BringUp(attempt) if outcome == "up":
                self.loaded = True
                self.post(BroughtUp(attempt))
            case BringUp(attempt):
                self.post(BringUpFailed(attempt, outcome, fault=outcome == "fault"))

    def lose(self):
        if self.loaded and not isinstance(self.work, TakeDown):
            self.loaded = False
            self.post(Lost("killed"))


steps = st.lists(
    st.sampled_from(["ready", "gone", "up", "refused", "fault", "lose", "prove", "downloading"]), max_size=40
)


@settings(max_examples=400)
@given(steps)
def test_whatever_happens_nobody_waits_for_ever_and_the_state_is_true(history):
    world = World()
    for step in history:
        match step:
            case "ready":
                world.post(EnsureReady())
            case "gone":
                world.post(EnsureGone())
            case "lose":
                world.lose()
            case "prove":
                world.post(Proved())
            case "downloading":
                world.post(Downloading(world.life.attempt))
            case outcome:
                world.end_work(outcome)
    for _ in range(20):
        if world.work is None:
            break
        world.end_work("refused" if world.called_off else "up")
    assert world.work is None
    assert world.ready_waiters == 0
    assert world.gone_waiters == 0
    assert world.loaded == (world.life.state is ModelState.READY)
    assert world.life.state in (ModelState.COLD, ModelState.READY, ModelState.FAILED)
