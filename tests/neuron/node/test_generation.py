"""What a follower of a generation gets, and when."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.neuron.engine.request import StepOutput
from cortex.neuron.node.generation import Generation
from cortex.wire.errors import CortexError, Recovering


class Follower:
    def __init__(self, generation: Generation) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        self.errors: list[CortexError] = []
        generation.follow(self.receive, self.errors.append)

    def receive(self, outputs: Sequence[StepOutput]) -> None:
        self.batches.append([output.tokens for output in outputs])


def test_outputs_before_the_follower_are_one_batch_and_later_ones_are_delivered_at_once() -> None:
    generation = Generation("r", lambda: None)
    for token in (1, 2):
        generation.push(StepOutput("r", (token,)))
    follower = Follower(generation)
    generation.push(StepOutput("r", (3,), finish="stop"))
    generation.push(StepOutput("r", (4,)))
    assert follower.batches == [[(1,), (2,)], [(3,)]]


def test_pause_keeps_outputs_and_resume_delivers_them_as_one_batch() -> None:
    generation = Generation("r", lambda: None)
    follower = Follower(generation)
    generation.pause()
    for token in (1, 2):
        generation.push(StepOutput("r", (token,)))
    generation.fail(Recovering("gone"))
    assert (follower.batches, follower.errors) == ([], [])
    generation.resume()
    assert follower.batches == [[(1,), (2,)]]
    assert [type(error) for error in follower.errors] == [Recovering]


def test_error_follows_the_unread_outputs_once() -> None:
    generation = Generation("r", lambda: None)
    generation.push(StepOutput("r", (1,)))
    generation.fail(Recovering("gone"))
    generation.push(StepOutput("r", (2,)))
    follower = Follower(generation)
    generation.resume()
    assert follower.batches == [[(1,)]]
    assert len(follower.errors) == 1


def test_cancel_after_the_end_does_nothing() -> None:
    cancelled = []
    generation = Generation("r", lambda: cancelled.append(1))
    generation.cancel()
    generation.push(StepOutput("r", finish="cancelled"))
    generation.cancel()
    assert cancelled == [1]
