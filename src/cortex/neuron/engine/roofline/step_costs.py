"""Predicts the time of the next step: the roofline's counts, at rates learned from earlier steps. Pure.

A step reads weights, states and KV, and multiplies its tokens with the weights. Both parts count in full, which is
right within a tenth for what was measured on GPUs. Every step corrects the rates of the two parts, each by its share
of the step, and then the time of steps of its size, because kernels, graphs and launches differ by size. Until a part
is measured, its rate follows that of the other: a machine that reads more slowly than assumed also computes so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork

PACE: Final = 0.15
"""The weight of the latest step; that of the first ones is higher."""
RECOVERY: Final = 0.01
"""How fast the times of unused sizes return to the expected ones, so that they are tried again."""
MOST_CHANGE: Final = 4.0
"""A step that exceeds the expected time by this factor counts as a pause of the machine, unless the next one does too.
Then it counts with this factor."""
FIRST_CHANGE: Final = 64.0
"""The same for the first steps, when the rates are still guesses."""
KNOWN: Final = 3.0
"""A rate is known after this many steps that consist of its part."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    num_streams: int
    """Rows of one token."""
    context_tokens: int = 0
    """Tokens before those of the streams, together."""
    prompt_tokens: int = 0
    prompt_worth: float = 0.0
    """The work of all prompt chunks: `StepWork.prompt_worth`."""

    def with_prompts(self, worth: float) -> StepShape:
        """The same streams, and prompts without attention."""
        return StepShape(self.num_streams, self.context_tokens, int(worth), worth)


class StepCosts:
    """Expected seconds of steps. Belongs to the engine thread."""

    def __init__(self, work: StepWork, limits: DeviceLimits) -> None:
        """`limits`: rough limits of the device, until steps are measured."""
        self.work = work
        self._read_s = 1.0 / limits.bytes_per_s
        self._flop_s = 1.0 / limits.flops
        self._num_reads = self._num_computes = 0.0
        """The number of steps behind each rate, weighted by the share of the part."""
        self._is_paused = False
        """Whether the last step took much longer than expected."""
        self._sizes: dict[tuple[bool, int], float] = {}
        """The measured time over the sum of the two parts, by kind and size of the step."""

    def seconds(self, shape: StepShape) -> float:
        """The expected time of the step."""
        return sum(self._parts(shape)) * self._sizes.get(_size(shape), 1.0)

    def prompt_tokens(self, shape: StepShape, seconds: float, most: int) -> int:
        """The number of prompt tokens, at most `most`, that fit the step within `seconds`. `shape`: its streams."""
        if self.seconds(shape.with_prompts(most)) <= seconds:
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            if self.seconds(shape.with_prompts(middle)) <= seconds:
                least = middle
            else:
                most = middle
        return least

    def record(self, shape: StepShape, seconds: float) -> None:
        """Reports a step that was computed."""
        read_s, compute_s = self._parts(shape)
        expected_s = read_s + compute_s
        reads, computes = read_s / expected_s, compute_s / expected_s
        is_known = (self._num_reads if reads > computes else self._num_computes) >= KNOWN
        was_paused, self._is_paused = self._is_paused, seconds > MOST_CHANGE * self.seconds(shape)
        if self._is_paused and is_known and not was_paused:
            return
        most = MOST_CHANGE if is_known else FIRST_CHANGE
        change = min(max(seconds / expected_s, 1 / most), most)
        of_reads = change ** (reads * max(PACE, 1 / (1 + self._num_reads)))
        of_computes = change ** (computes * max(PACE, 1 / (1 + self._num_computes)))
        self._read_s *= of_reads * of_computes ** max(0.0, 1 - self._num_reads)
        self._flop_s *= of_computes * of_reads ** max(0.0, 1 - self._num_computes)
        self._num_reads += reads
        self._num_computes += computes
        for size, ratio in self._sizes.items():
            self._sizes[size] = ratio + (1.0 - ratio) * RECOVERY
        size = _size(shape)
        known, expected_s = self._sizes.get(size, 1.0), sum(self._parts(shape))
        ratio = min(max(seconds / expected_s, 1 / MOST_CHANGE), MOST_CHANGE)
        self._sizes[size] = known + (ratio - known) * PACE

    def _parts(self, shape: StepShape) -> tuple[float, float]:
        """Seconds of reading and of computing. Both are above zero."""
        tokens = shape.num_streams + shape.prompt_tokens
        read = self.work.step_bytes(tokens, shape.num_streams, shape.context_tokens)
        flops = 2.0 * self.work.weights_per_token * (shape.num_streams + shape.prompt_worth)
        return max(1.0, read) * self._read_s, max(1.0, flops) * self._flop_s


def _size(shape: StepShape) -> tuple[bool, int]:
    """Steps of the same kind and about the same size."""
    if not shape.prompt_tokens:
        return True, -shape.num_streams.bit_length()
    return shape.num_streams > 0, shape.prompt_tokens.bit_length()
