"""Checkpoints of recurrent states: every slot is in exactly one state, and a digest leads to the state saved for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints, checkpoint_positions, chunk_end

FIRST = 7


def names(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


@pytest.mark.parametrize(
    ("turn_ends", "num_tokens", "expected"),
    [
        ((), 100, (96,)),
        ((), 97, (96,)),
        ((), 96, (64,)),  # the 96th token must be computed, so its page cannot be skipped
        ((), 32, ()),
        ((40, 70), 100, (32, 64, 96)),
        ((33, 60), 62, (32,)),
        ((40, 100, 150, 170, 200), 300, (32, 160, 192, 288)),
        ((200, 40), 300, (32, 192, 288)),
        ((40, 300, 500), 300, (32, 288)),
    ],
)
def test_states_are_saved_at_page_ends_before_turn_ends(
    turn_ends: tuple[int, ...], num_tokens: int, expected: tuple[int, ...]
) -> None:
    assert checkpoint_positions(turn_ends, 0, num_tokens, 32, 0) == expected


@pytest.mark.parametrize(
    ("start", "spacing_tokens", "expected"),
    [(0, 64, (160, 288)), (0, 100, (160, 288)), (96, 64, (160, 288)), (128, 64, (192, 288)), (192, 100, ())],
)
def test_states_are_saved_at_least_the_spacing_apart(
    start: int, spacing_tokens: int, expected: tuple[int, ...]
) -> None:
    assert checkpoint_positions((40, 170, 200), start, 300, 32, spacing_tokens) == expected


@pytest.mark.parametrize(
    ("turn_ends", "picture_end", "spacing_tokens", "expected"),
    [
        ((), 200, 0, (192, 288)),
        ((), 200, 100, (192,)),  # the end of the prompt is near
        ((40, 250), 200, 64, (192, 288)),
        ((), 300, 0, (288,)),  # the picture is the last of the prompt
    ],
)
def test_a_state_is_saved_after_the_last_picture(
    turn_ends: tuple[int, ...], picture_end: int, spacing_tokens: int, expected: tuple[int, ...]
) -> None:
    assert checkpoint_positions(turn_ends, 0, 300, 32, spacing_tokens, picture_end=picture_end) == expected


@pytest.mark.parametrize(
    ("start", "shared_end", "spacing_tokens", "expected"),
    [
        (0, 192, 0, (192, 288)),
        (0, 192, 100, (192,)),
        (0, 320, 0, (288,)),  # the earlier prompt was longer
        (192, 192, 0, (288,)),  # its state is known
        (160, 192, 64, (288,)),
    ],
)
def test_a_state_is_saved_where_a_prompt_diverges_from_an_earlier_one(
    start: int, shared_end: int, spacing_tokens: int, expected: tuple[int, ...]
) -> None:
    assert checkpoint_positions((), start, 300, 32, spacing_tokens, shared_end=shared_end) == expected


@given(
    st.lists(st.integers(-5, 500)),
    st.integers(0, 400),
    st.integers(1, 400),
    st.integers(1, 64),
    st.integers(0, 100),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_no_state_is_saved_where_it_could_not_be_used(
    turn_ends: list[int], start: int, num_tokens: int, page_tokens: int, spacing: int, shared: int, picture: int
) -> None:
    branches = {"shared_end": shared, "picture_end": picture}
    positions = checkpoint_positions(turn_ends, start, num_tokens, page_tokens, spacing, **branches)
    assert all(start < position < num_tokens and position % page_tokens == 0 for position in positions)
    stretches = [end - begin for begin, end in zip((start, *positions), positions, strict=False)]
    assert all(stretch > 0 and stretch >= spacing for stretch in stretches)
    assert len(positions) <= 6


@pytest.mark.parametrize(
    ("positions", "start", "end", "expected"),
    [
        ((), 0, 100, 100),
        ((96,), 0, 100, 100),
        ((32, 96), 0, 100, 32),
        ((32, 96), 32, 100, 100),
        ((32, 64, 96), 0, 100, 64),
        ((32, 64, 96), 0, 96, 32),
        ((32, 64, 96), 0, 64, 64),
        ((32, 64, 96, 128), 0, 140, 32),
        ((32, 64, 96, 128), 32, 140, 96),
        ((32,), 40, 100, 100),
    ],
)
def test_chunk_contains_one_position_at_most(positions: tuple[int, ...], start: int, end: int, expected: int) -> None:
    assert chunk_end(positions, start, end, cuts_rows=True) == expected
    first = next((position for position in positions if start < position < end), end)
    assert chunk_end(positions, start, end, cuts_rows=False) == first


@given(st.sets(st.integers(1, 40)), st.integers(1, 60), st.integers(1, 60))
def test_chunks_reach_every_position(chosen: set[int], num_tokens: int, budget: int) -> None:
    positions, start, chunks = tuple(sorted(chosen)), 0, 0
    while start < num_tokens:
        end = chunk_end(positions, start, min(num_tokens, start + budget), cuts_rows=True)
        assert start < end <= start + budget
        assert sum(start < position < end for position in positions) <= 1
        start, chunks = end, chunks + 1
    if budget >= num_tokens:
        assert chunks == sum(position < num_tokens for position in positions) // 2 + 1


def test_knows_the_prefixes_whose_state_it_keeps() -> None:
    checkpoints = RecurrentCheckpoints(FIRST, 3)
    a, b, c = names(3)
    assert not any(map(checkpoints.knows, (a, b, c)))
    assert checkpoints.keep(b) == FIRST
    assert [checkpoints.knows(digest) for digest in (a, b, c)] == [False, True, False]
    assert checkpoints.use(b) == FIRST


def test_state_that_the_planned_step_reads_is_not_overwritten_before() -> None:
    checkpoints = RecurrentCheckpoints(FIRST, 2)
    a, b = names(2)
    slot_a = checkpoints.keep(a)
    checkpoints.begin_step()
    assert checkpoints.use(a) == slot_a
    assert checkpoints.keep(b) != slot_a
    assert checkpoints.lend() is None, "both slots belong to the step"
    checkpoints.begin_step()
    assert checkpoints.lend() == slot_a


def test_evicts_the_least_recently_used_state_first() -> None:
    checkpoints = RecurrentCheckpoints(FIRST, 2)
    a, b, c = names(3)
    slot_a, slot_b = checkpoints.keep(a), checkpoints.keep(b)
    assert checkpoints.use(a) == slot_a
    checkpoints.begin_step()
    assert checkpoints.keep(c) == slot_b
    assert not checkpoints.knows(b)
    assert checkpoints.keep(a) is None  # known: now the most recently used
    checkpoints.begin_step()
    assert checkpoints.keep(b) == slot_b
    assert not checkpoints.knows(c)


def test_slot_that_a_step_writes_is_not_taken_for_another_state_of_the_step() -> None:
    checkpoints = RecurrentCheckpoints(FIRST, 2)
    a, b, c = names(3)
    checkpoints.keep(a)
    checkpoints.begin_step()
    slot_b = checkpoints.keep(b)
    assert checkpoints.keep(c) == ({FIRST, FIRST + 1} - {slot_b}).pop()
    assert checkpoints.keep(a) is None
    assert checkpoints.lend() is None
    checkpoints.begin_step()
    assert checkpoints.lend() == slot_b


def test_decode_checkpoints_leave_half_of_the_slots_to_prompts() -> None:
    checkpoints = RecurrentCheckpoints(FIRST, 4)
    slots = [checkpoints.lend(), checkpoints.lend()]
    assert None not in slots
    assert checkpoints.lend() is None
    assert checkpoints.keep(b"a") is not None
    assert RecurrentCheckpoints(FIRST, 0).lend() is None
    assert RecurrentCheckpoints(FIRST, 0).keep(b"a") is None


class CheckpointMachine(RuleBasedStateMachine):
    """Random use, compared with a model of what each slot contains."""

    @initialize(num_slots=st.integers(0, 6))
    def start(self, num_slots: int) -> None:
        self.checkpoints = RecurrentCheckpoints(FIRST, num_slots)
        self.contents: dict[int, bytes] = {}
        self.lent: list[int] = []

    @rule(digest=st.sampled_from(names(8)))
    def keep(self, digest: bytes) -> None:
        self.checkpoints.begin_step()
        slot = self.checkpoints.keep(digest)
        if slot is not None:
            assert slot not in self.lent
            self.contents[slot] = digest

    @rule()
    def lend(self) -> None:
        slot = self.checkpoints.lend()
        if slot is not None:
            assert slot not in self.lent
            self.lent.append(slot)
            self.contents[slot] = b"somebody's"

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), digest=st.none() | st.sampled_from(names(8)))
    def take_back(self, data: st.DataObject, digest: bytes | None) -> None:
        slot = data.draw(st.sampled_from(self.lent))
        self.lent.remove(slot)
        self.contents[slot] = digest or b"nothing"
        self.checkpoints.take_back(slot, digest)

    @rule(digests=st.lists(st.sampled_from(names(8))))
    def forget(self, digests: list[bytes]) -> None:
        self.checkpoints.forget(digests)
        assert not any(map(self.checkpoints.knows, digests))

    @rule(digest=st.sampled_from(names(8)))
    def use(self, digest: bytes) -> None:
        if self.checkpoints.knows(digest):
            assert self.contents[self.checkpoints.use(digest)] == digest

    @invariant()
    def whole(self) -> None:
        self.checkpoints.check_integrity(self.lent)


TestCheckpointMachine = CheckpointMachine.TestCase
TestCheckpointMachine.settings = settings(stateful_step_count=30)
