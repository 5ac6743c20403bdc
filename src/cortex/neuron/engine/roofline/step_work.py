"""The minimum of bytes and operations of a model's step, which with the device's limits give its shortest time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Measured rates of a device."""

    bytes_per_s: float
    """A large read of its memory."""
    flops: float
    """Floating-point operations per second of a large product, in the dtype that models compute in."""
    host_bytes_per_s: float = 0.0
    """A large read of the host's memory by its CPU; 0: not measured."""
    bus_bytes_per_s: float = 0.0
    """A copy from page-locked host memory to the device; 0: not measured."""


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """The routed experts of some layers, all with the same share."""

    num_bytes: int
    share: float
    """The part of them that one token selects."""

    def read_bytes(self, rows: int) -> float:
        """Those that a batch of `rows` selects under uniform routing."""
        return self.num_bytes * (1 - (1 - self.share) ** rows)


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one model, or of one rank of it; those of ranks add up."""

    weight_bytes: int
    """Weights that every step reads: all but the embedding and the routed experts."""
    experts: tuple[ExpertWork, ...] = ()
    token_bytes: int = 0
    """KV bytes that a row reads per preceding token."""
    state_bytes: int = 0
    """Recurrent states that a row reads."""
    weights_per_token: int = 0
    """Weights that each prompt token is multiplied with, without the head."""
    attention_width: int = 0
    """The query heads' elements, over all layers."""

    def read_bytes(self, rows: int, context_tokens: int = 0) -> float:
        """What a step of `rows` sequences reads, each with `context_tokens` before it."""
        return self.step_bytes(rows, rows, rows * context_tokens)

    def step_bytes(self, tokens: int, rows: int, context_tokens: int) -> float:
        """What a step of `tokens` in `rows` sequences reads, which have `context_tokens` before them together."""
        experts = sum([each.read_bytes(tokens) for each in self.experts])
        return self.weight_bytes + experts + rows * self.state_bytes + context_tokens * self.token_bytes

    def prompt_flops(self, tokens: int) -> float:
        """Floating-point operations of a prompt: products with weights, and causal attention."""
        return 2.0 * self.weights_per_token * self.prompt_worth(0, tokens)

    def prompt_worth(self, start: int, tokens: int) -> float:
        """The work of a prompt chunk that begins at `start`, as the number of tokens with equal work without
        attention."""
        return tokens * (1.0 + self._attention_weight * (start + tokens / 2))

    def tokens_worth(self, start: int, worth: float) -> int:
        """The most tokens of a chunk that begins at `start` that are worth no more."""
        growth, slope = self._attention_weight, 1.0 + self._attention_weight * start
        return int(2.0 * worth / (slope + sqrt(slope * slope + 2.0 * growth * worth)) + 1e-6)

    @property
    def _attention_weight(self) -> float:
        """The cost of attention to one more token, relative to a token's products with the weights."""
        return 2.0 * self.attention_width / max(1, self.weights_per_token)

    @classmethod
    def together(cls, parts: Iterable[StepWork]) -> StepWork:
        """The ranks of a divided model as one. `parts` is not empty."""
        ranks = list(parts)
        shares = dict.fromkeys(each.share for rank in ranks for each in rank.experts)
        return cls(
            weight_bytes=sum(rank.weight_bytes for rank in ranks),
            experts=tuple(
                ExpertWork(sum(each.num_bytes for rank in ranks for each in rank.experts if each.share == share), share)
                for share in shares
            ),
            token_bytes=sum(rank.token_bytes for rank in ranks),
            state_bytes=sum(rank.state_bytes for rank in ranks),
            weights_per_token=sum(rank.weights_per_token for rank in ranks),
            attention_width=sum(rank.attention_width for rank in ranks),
        )
