"""What an engine has done for its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortex.neuron.engine.speculation.speculation import CheckedDraft


@dataclass(slots=True)
class Counters:
    """Work done for requests since the load. A sleep does not reset them: the next step loop continues them."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    fetched_tokens: int = 0
    drafted_tokens: dict[str, int] = field(default_factory=dict)
    """By the kind of the draft, as `accepted_tokens`. Never changed in place: copies of the counters share them."""
    accepted_tokens: dict[str, int] = field(default_factory=dict)

    def count(self, checked: CheckedDraft) -> None:
        kind = checked.kind
        drafted, accepted = self.drafted_tokens, self.accepted_tokens
        self.drafted_tokens = drafted | {kind: drafted.get(kind, 0) + checked.num_drafted}
        self.accepted_tokens = accepted | {kind: accepted.get(kind, 0) + checked.num_accepted}
