"""Decode steps on a CPU switch to the faster number of threads, and back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cortex.neuron.engine.execution.threads import StepThreads, ThreadChoice

ALL = 8


def run(choice: ThreadChoice, seconds: dict[int, float], steps: int) -> list[int]:
    """The threads of each step, if a step takes `seconds` by its number of threads."""
    taken = []
    for _ in range(steps):
        taken.append(choice.threads)
        choice.record(seconds[choice.threads])
    return taken


def test_keeps_all_threads_if_faster_and_tries_become_rare() -> None:
    taken = run(ThreadChoice(ALL), {1: 1.5, ALL: 1.0}, 10_000)
    assert taken[0] == taken[-1] == ALL
    assert taken.count(1) < 50


def test_much_slower_try_ends_after_its_first_step() -> None:
    taken = run(ThreadChoice(ALL), {1: 5.0, ALL: 1.0}, 100)
    assert taken.count(1) <= 5
    assert all(pair != [1, 1] for pair in map(list, pairwise(taken)))


def test_slower_try_ends_after_its_second_step() -> None:
    taken = run(ThreadChoice(ALL), {1: 1.7, ALL: 1.0}, 100)
    assert taken.count(1) == 6  # after 8, 16 and 32 steps
    assert all(triple != (1, 1, 1) for triple in zip(taken, taken[1:], taken[2:], strict=False))


def test_switches_to_one_thread_if_faster_and_back() -> None:
    choice = ThreadChoice(ALL)
    assert run(choice, {1: 1.0, ALL: 3.0}, 200)[-100:].count(ALL) <= 3
    assert run(choice, {1: 1.0, ALL: 0.6}, 5_000)[-1] == ALL


def test_single_thread_never_tries() -> None:
    assert set(run(ThreadChoice(1), {1: 1.0}, 50)) == {1}


def test_step_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    threads = StepThreads()
    for _ in range(30):
        with threads.decoding(1):
            pass
    with pytest.raises(RuntimeError), threads.decoding(1):
        raise RuntimeError
    assert torch.get_num_threads() == before
