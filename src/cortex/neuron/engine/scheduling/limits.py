"""What a step and a sequence may have at most. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PROMPTS_PER_SHARE = 8
"""For every 8 waiting prompts, a step that also decodes may prefill another `mixed_prefill_tokens`."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_rows: int
    """Sequences that run at once."""
    step_tokens: int
    """Most tokens that one step computes, decode rows included."""
    mixed_prefill_tokens: int
    """Prefill tokens in a step that also decodes, unless many prompts wait. Keeps running streams at their pace."""
    context_tokens: int
    """Longest sequence, prompt and output together."""
    reserved_tokens: int = 0
    """Pages are reserved for each row up to this many tokens ahead, at most up to its `max_tokens`. Responses no
    longer than this are never preempted. Clients set `max_tokens` far above usual lengths: reserving all of it would
    leave rows idle."""

    def prefill_tokens(self, num_decodes: int, num_waiting: int) -> int:
        """Most prefill tokens of a step. If there are decode rows, a few prompts get little, so that running streams do
        not stutter. Many prompts get up to half of a step: they start at nearly full pace, and the stutter ends
        sooner."""
        room = self.step_tokens - num_decodes
        if num_decodes == 0:
            return room
        for_many = min(self.mixed_prefill_tokens * (num_waiting // PROMPTS_PER_SHARE), self.step_tokens // 2)
        return min(room, max(self.mixed_prefill_tokens, for_many))
