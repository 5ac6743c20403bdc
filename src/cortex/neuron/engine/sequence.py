"""A request while it runs: its tokens, its pages, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortex.neuron.engine.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.recurrent_checkpoints import DecodeCheckpoint
from cortex.neuron.engine.request import EngineRequest, TokenLogprobs
from cortex.neuron.engine.sampling.constraints import Constraint

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request. The scheduler is the only writer.

    `tokens` are those that the host knows. A launched step whose result is not read yet has drawn one more, which
    exists only on the device: `in_flight` counts those. `computed` counts positions whose KV is written by the
    steps launched so far; the device runs them in order, so later steps may rely on it.
    """

    request: EngineRequest
    tokens: list[int]
    row: int = NO_ROW
    pages: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    drew_in_row: bool = False
    """Whether its last token was drawn in its current row, so that the device has it."""
    committed: int = 0
    """Leading pages whose digests the pool knows."""
    cached: int | None = None
    """Prompt tokens that came from the prefix cache at first admission."""
    checkpoints: tuple[int, ...] = ()
    """Positions where its recurrent state will be saved, if the model has one."""
    decode_checkpoint: DecodeCheckpoint | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt from its second token on, as far as steps were read; only if the request asks for them."""
    has_reported: bool = False
    """Whether its first output was made."""
    constraint: Constraint | None = None
    """The grammar that its output must conform to; None: no constraint."""
    finished: bool = False

    @classmethod
    def of(cls, request: EngineRequest) -> Sequence:
        return cls(request, list(request.prompt))

    @property
    def length(self) -> int:
        """Tokens of the prompt and drawn so far, including those that only the device knows."""
        return len(self.tokens) + self.in_flight

    @property
    def num_drawn(self) -> int:
        return self.length - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Positions whose KV must be computed before the next token can be drawn."""
        return self.length - self.computed

    @property
    def is_decoding(self) -> bool:
        """Whether only the last drawn token is left to compute."""
        return self.drew_in_row

    @property
    def wants_more(self) -> bool:
        return not self.finished and self.num_drawn < self.request.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still needed: then every position is computed, cached or not."""
        return self.request.prompt_logprobs is not None and not self.has_reported

    def digests_of_full_pages(self, page_tokens: int) -> list[Digest]:
        """Digests of every full page of the known tokens, extended as tokens arrive."""
        done = len(self.digests) * page_tokens
        if len(self.tokens) - done >= page_tokens:
            parent = self.digests[-1] if self.digests else ROOT
            self.digests += page_digests(parent, self.tokens[done:], page_tokens)
        return self.digests
