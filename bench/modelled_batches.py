"""What `bench/batches.py` measures, on a modelled device in virtual time.

    PYTHONPATH=src:bench python bench/modelled_batches.py --rates 1 4 12

The scheduler, the step loop and the gateway's caps are the real ones; the device is a clock
(`bench/modelled_device.py`).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from typing import Literal

from cortex.fleet.idle_caps import IdleCaps
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.system.fair_turns import DEFAULT, IDLE
from modelled_device import ModelledEngine, VirtualClock
from scripted_engine import FIRST_WORD, VOCAB
from workloads import percentile

Phase = Literal["alone", "batches", "flood"]
PHASES: tuple[Phase, ...] = ("alone", "batches", "flood")

HTTP_S = 0.008
"""What gateway and node add to the first token."""
PUMP_S = 0.25
"""How often the gateway starts lines."""
LINES_FROM_S, MEASURED_FROM_S = 15.0, 40.0
"""Lines begin when the gateway knows how fast requests are without them, and are measured once it knows how many of
them may run."""
NODE = "node"


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    response: int


INTERACTIVE = Lengths(200, 64)
LINE = Lengths(400, 128)


@dataclass(slots=True)
class Seen:
    """What clients saw: times of interactive requests, and the tokens of lines."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    line_tokens: int = 0


@dataclass(slots=True)
class _Request:
    came_s: float
    is_line: bool
    had_lines: bool = False
    first_s: float | None = None
    latest_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class Simulation:
    """One phase: interactive requests that arrive at random, and lines that always wait."""

    def __init__(
        self, phase: Phase, rate: float, seconds: float, num_lines: int, *, is_capped: bool, seed: int
    ) -> None:
        self._phase = phase
        self._clock = VirtualClock()
        self._engine = ModelledEngine(1.0, self._clock)
        self._draw = random.Random(seed)
        self._seconds = MEASURED_FROM_S + seconds
        self._num_lines = num_lines
        self._caps = IdleCaps(num_lines)
        self._is_capped = is_capped
        self._requests: dict[str, _Request] = {}
        self._num_started = self._num_interactive = 0
        self._pump_at_s = 0.0
        arrivals, at_s = [], 1.0
        while (at_s := at_s + self._draw.expovariate(rate)) < self._seconds:
            arrivals.append(at_s)
        self._arrivals = arrivals[::-1]

    def run(self) -> Seen:
        seen, clock, engine = Seen(), self._clock, self._engine
        while clock() < self._seconds:
            if clock() < MEASURED_FROM_S:
                seen = Seen()
            self._add_lines()
            while self._arrivals and (self._arrivals[-1] <= clock() or not engine.has_work):
                clock.wait_until(self._arrivals[-1])
                self._submit(INTERACTIVE, self._arrivals.pop(), is_line=False)
                self._add_lines()
            if not engine.has_work:
                break
            for output in engine.step():
                self._record(output.request_id, len(output.tokens), output.finish is not None, seen)
        return seen

    def _add_lines(self) -> None:
        if self._phase == "alone" or self._clock() < LINES_FROM_S:
            return
        now, lines = self._clock(), self._caps.lines
        most = self._num_lines
        if self._phase == "batches" and self._is_capped:
            if now < self._pump_at_s:
                return
            self._pump_at_s = now + PUMP_S
            most = self._caps.cap(NODE, now, num_interactive=self._num_interactive)
        while lines[NODE] < most:
            lines[NODE] += 1
            self._caps.paced[NODE] += 1
            self._submit(LINE, now, is_line=True)

    def _submit(self, lengths: Lengths, came_s: float, *, is_line: bool) -> None:
        self._num_started += 1
        name = str(self._num_started)
        prompt = tuple(self._draw.choices(range(FIRST_WORD, VOCAB), k=lengths.prompt))
        level = IDLE if is_line and self._phase == "batches" else DEFAULT
        self._engine.submit(EngineRequest(name, prompt, lengths.response, SamplingParams(), level=level))
        self._requests[name] = _Request(came_s, is_line, had_lines=self._caps.lines[NODE] > 0)
        if not is_line:
            self._caps.began(NODE, came_s)
            self._num_interactive += 1

    def _record(self, name: str, num_tokens: int, is_last: bool, seen: Seen) -> None:
        request, now = self._requests[name], self._clock()
        if request.is_line:
            seen.line_tokens += num_tokens
        elif request.first_s is None:
            request.first_s = now - request.came_s + HTTP_S
            seen.first_s.append(request.first_s)
        else:
            seen.gaps_s.append(now - request.latest_s)
            request.gaps_s.append(now - request.latest_s)
        request.latest_s = now
        if not is_last:
            return
        del self._requests[name]
        if request.is_line:
            self._caps.completed(NODE, now)
            self._caps.lines[NODE] -= 1
            self._caps.paced[NODE] -= 1
            self._pump_at_s = 0.0
        else:
            self._num_interactive -= 1
            gap_s = sum(request.gaps_s) / len(request.gaps_s)
            self._caps.served(NODE, "m", now, ttft_s=request.first_s, num_tokens=INTERACTIVE.prompt, gap_s=gap_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 4, 12], help="interactive requests per second")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--lines", type=int, default=64, help="lines at once")
    parser.add_argument("--uncapped", action="store_true", help="without the gateway's cap")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for rate in options.rates:
        found = {phase: measured(phase, rate, options) for phase in PHASES}
        alone, flood = found["alone"], found["flood"]
        for phase, seen in found.items():
            first, gaps = _figures(seen.first_s, alone.first_s), _figures(seen.gaps_s, alone.gaps_s)
            per_s, share = seen.line_tokens / options.seconds, seen.line_tokens / max(1, flood.line_tokens)
            print(f"{rate:g}/s {phase:8} first token {first}, gaps {gaps}, lines {per_s:,.0f} tok/s ({share:.0%})")


def measured(phase: Phase, rate: float, options: argparse.Namespace) -> Seen:
    is_capped = not options.uncapped
    return Simulation(phase, rate, options.seconds, options.lines, is_capped=is_capped, seed=options.seed).run()


def _figures(times: list[float], alone: list[float]) -> str:
    shown = " / ".join(f"{1e3 * percentile(times, share):.1f}" for share in (0.5, 0.9, 0.99))
    return f"{shown} ms ({percentile(times, 0.99) / percentile(alone, 0.99):.2f})"


if __name__ == "__main__":
    main()
