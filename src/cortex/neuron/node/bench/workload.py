"""The workload of a measurement, within a model's limits, and the rates that follow from its times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork

DECODE_PROMPT_TOKENS = 32
"""Short, because decoding is measured."""
MIN_DECODE_TOKENS = 16
"""Minimum for a meaningful rate."""
PROBE_TOKENS = 128
"""A first prompt, which shows how long a prompt may be here."""
PROMPT_S = 4.0
"""A prompt that is measured takes about this long at most."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a measurement asks of a model at most, and how long it waits."""

    streams: tuple[int, ...] = (1, 8, 64)
    """The measured numbers of concurrent responses."""
    decode_tokens: int = 256
    prompt_tokens: int = 2048
    prompt_repeats: int = 3
    warm_up_s: float = 8.0
    streams_s: float = 8.0
    """Maximum duration for a number of streams; slow ones produce fewer tokens."""
    prompt_s: float = 15.0


@dataclass(frozen=True, slots=True)
class ModelCapacity:
    """A model's limits on concurrent work."""

    workload: Workload
    context_tokens: int
    max_prompt_tokens: int | None
    slots: int
    """Requests that run together."""
    cache_tokens: int
    """Tokens of all sequences together."""

    def decode_tokens(self, streams: int) -> int:
        """The tokens of each of `streams` concurrent responses; 0 if they do not fit."""
        if streams > self.slots:
            return 0
        longest = min(self.context_tokens, self.cache_tokens // streams) - DECODE_PROMPT_TOKENS
        tokens = min(self.workload.decode_tokens, longest)
        return tokens if tokens >= MIN_DECODE_TOKENS else 0

    def prompt_tokens(self, tokens_per_s: float) -> int:
        """The length of the prompt to measure, given the rate of a short one."""
        longest = min(self.context_tokens - 1, self.max_prompt_tokens or self.context_tokens, self.cache_tokens - 1)
        wanted = max(PROBE_TOKENS, round(tokens_per_s * PROMPT_S))
        return max(1, min(self.workload.prompt_tokens, longest, wanted))


Arrivals = Sequence[tuple[float, int]]
"""When tokens of one stream came, in order: (seconds, how many)."""


def steady_rate(streams: Sequence[Arrivals]) -> float | None:
    """Tokens per second of all streams while all of them ran: from the last one's first token to the first one's last.
    None if there was no such time."""
    if not streams or not all(streams):
        return None
    begin_s = max(arrivals[0][0] for arrivals in streams)
    end_s = min(arrivals[-1][0] for arrivals in streams)
    if end_s <= begin_s:
        return None
    count = sum(tokens for arrivals in streams for at_s, tokens in arrivals if begin_s < at_s <= end_s)
    return count / (end_s - begin_s)


def mean_tokens(streams: Sequence[Arrivals]) -> float:
    """Tokens of each stream. `streams` is not empty."""
    return sum(tokens for arrivals in streams for _, tokens in arrivals) / len(streams)


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The limits of the devices that run one step of a model, and the number of replicas."""

    work: StepWork
    devices: DeviceLimits
    replicas: int = 1

    @classmethod
    def of(
        cls, work: StepWork, devices: Sequence[DeviceLimits], *, replicas: int, is_staged: bool
    ) -> ReplicaLimits | None:
        """`devices`: those of one replica; ranks that divide every layer read together, stages one after the other."""
        if not devices:
            return None
        bytes_per_s = sum(each.bytes_per_s for each in devices)
        flops = sum(each.flops for each in devices)
        if is_staged:
            bytes_per_s, flops = bytes_per_s / len(devices), flops / len(devices)
        limits = replace(devices[0], bytes_per_s=bytes_per_s, flops=flops)
        return cls(work, limits, replicas)

    def or_faster(self, other: ReplicaLimits) -> ReplicaLimits:
        """The higher limits of two measurements."""
        both = zip(astuple(self.devices), astuple(other.devices), strict=True)
        return replace(self, devices=DeviceLimits(*map(max, both)))

    def decode_share(self, streams: int, tokens_per_s: float, *, tokens: float) -> float:
        """The rate of concurrent responses with `tokens` each, as a share of the limit."""
        rows = -(-streams // self.replicas)
        used = min(self.replicas, streams)
        context_tokens = DECODE_PROMPT_TOKENS + round(tokens / 2)
        step_s = max(
            self.work.read_bytes(rows, context_tokens) / self.devices.bytes_per_s,
            2.0 * rows * self.work.weights_per_token / self.devices.flops,
        )
        return tokens_per_s * step_s / (rows * used)

    def prompt_share(self, tokens: int, tokens_per_s: float) -> float:
        """The rate of one prompt, as a share of the limit."""
        limit_s = max(
            self.work.prompt_flops(tokens) / self.devices.flops,
            self.work.read_bytes(tokens) / self.devices.bytes_per_s,
        )
        return tokens_per_s * limit_s / tokens
