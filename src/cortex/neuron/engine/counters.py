"""What an engine has done for its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counters:
    """Work done for requests since the load. A sleep does not reset them: the next step loop continues them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    fetched_tokens: int = 0
    """Prompt tokens whose pages were in host memory; they count as cached too."""
    drafted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Draft tokens that were checked, by where they came from."""
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    """Those of them that were drawn."""

    def plus(self, more: Counters) -> Counters:
        return Counters(
            steps=self.steps + more.steps,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            cached_tokens=self.cached_tokens + more.cached_tokens,
            completion_tokens=self.completion_tokens + more.completion_tokens,
            preemptions=self.preemptions + more.preemptions,
            fetched_tokens=self.fetched_tokens + more.fetched_tokens,
            drafted_tokens=_sums(self.drafted_tokens, more.drafted_tokens),
            accepted_tokens=_sums(self.accepted_tokens, more.accepted_tokens),
        )


def _sums(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    return {kind: first.get(kind, 0) + second.get(kind, 0) for kind in (*first, *second)} if second else first
