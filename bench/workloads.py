"""The workloads of the engine benchmarks, run in-process or over HTTP against a daemon.

Prompts are random token ids. Responses are greedy and ignore the end token, so that the work depends on sizes alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the client of a server needs no package
    from cortex.neuron.engine.request import EngineInfo

Prompt = tuple[int, ...]
Run = Callable[[Sequence[Prompt], int], float]
"""(prompts, output tokens of each) → seconds from submission to the last token of all of them."""

DECODE_PROMPT_TOKENS = 512
DECODED_TOKENS = 256
TAIL_TOKENS = 24
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1_000, 150_000


class Workloads:
    """Each workload returns the best of a few runs, after one warm-up run."""

    def __init__(self, run: Run, vocab_size: int) -> None:
        self._run = run
        self._first_id = min(FIRST_TOKEN_ID, vocab_size // 2)
        self._top_id = min(LAST_TOKEN_ID, vocab_size)
        self._random = random.Random(0)

    def decode_step_s(self, streams: int) -> float:
        """Seconds per token: (run − same run with one output token) / tokens after the first."""
        self._run(self._prompts(streams), 3)
        first_s = min(self._run(self._prompts(streams), 1) for _ in range(2))
        whole_s = min(self._run(self._prompts(streams), DECODED_TOKENS + 1) for _ in range(2))
        return (whole_s - first_s) / DECODED_TOKENS

    def prefill_s(self, tokens: int) -> float:
        """Seconds to the first token of a prompt that is not cached."""
        self._run([self._prompt(tokens)], 1)
        return min(self._run([self._prompt(tokens)], 1) for _ in range(3))

    def cached_s(self, tokens: int) -> float:
        """Seconds to the first token of a prompt that is fully cached."""
        prompt = self._prompt(tokens)
        self._run([prompt], 1)
        return min(self._run([prompt], 1) for _ in range(3))

    def tail_s(self, tokens: int) -> float:
        """Seconds to the first token of a prompt whose first `tokens` are cached, and TAIL_TOKENS are not."""
        prompt = self._prompt(tokens)
        self._run([prompt], 1)
        return min(self._run([prompt + self._prompt(TAIL_TOKENS)], 1) for _ in range(4))

    def requests_tokens_per_s(self, count: int) -> float:
        """Output tokens per second of `count` concurrent requests, 128 to 1,024 tokens in and 256 out."""
        prompts = [self._prompt(self._random.randrange(128, 1025)) for _ in range(count)]
        return count * 256 / self._run(prompts, 256)

    def _prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(DECODE_PROMPT_TOKENS) for _ in range(count)]

    def _prompt(self, length: int) -> Prompt:
        return tuple(self._random.randrange(self._first_id, self._top_id) for _ in range(length))


def arriving_requests(per_s: float, seconds: float, seed: int = 5) -> list[tuple[float, int, int]]:
    """Poisson arrivals with log-normal lengths, as (second of arrival, prompt tokens, response tokens): medians of
    about 400 and 150 tokens."""
    draw, at_s, requests = random.Random(seed), 0.0, []
    for _ in range(round(per_s * seconds)):
        at_s += draw.expovariate(per_s)
        prompt, response = int(draw.lognormvariate(6.0, 1.0)) + 8, int(draw.lognormvariate(5.0, 0.8)) + 8
        requests.append((at_s, min(4000, prompt), min(900, response)))
    return requests


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of all are below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def weights_read(info: EngineInfo) -> str:
    """What a model's weights take, and what of them a token really reads: shows whether they are quantised as asked."""
    read = "" if info.work is None else f", {info.work.read_bytes(1) / 1e9:.3f} GB of them read for a token"
    return f"weights: {info.weight_bytes / 1e9:.3f} GB{read}"


def table_row(scenario: str, figures: Mapping[str, float]) -> str:
    """One scenario as a line of text."""
    return f"{scenario:15} " + "  ".join(f"{name} {value:,.2f}" for name, value in figures.items())
