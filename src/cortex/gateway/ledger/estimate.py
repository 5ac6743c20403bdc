"""How many tokens a request may use, and how many of them it reserves. Pure.

The gateway does not tokenise, so a prompt is estimated by its size, and the tokens that a request reserves are also the
most that its node lets it use. An estimate that is too low therefore never exceeds a budget: it ends the response early
or, where the prompt alone is larger, makes the gateway reserve again with the number of tokens that the node counted.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cortex.wire.fields.sampling import DEFAULT_COMPLETION_TOKENS

BYTES_PER_TOKEN = 4
"""As in most texts. No token has less than one byte."""
LIKELY_TEMPLATE_TOKENS = 256
"""What a chat template adds to the texts of a request."""
MAX_TEMPLATE_TOKENS = 4096
UNKNOWN = 2**62
"""More tokens than any budget has."""


class TokenLimits(Protocol):
    """What the body of a request says about the tokens that may be generated for it."""

    @property
    def model(self) -> str:
        """As the client named it."""

    @property
    def completion_limit(self) -> int | None:
        """The most tokens of one choice; None where the client sets no limit."""

    @property
    def num_choices(self) -> int: ...

    @property
    def picture_tokens(self) -> int:
        """About the most that its pictures take; their bytes are no part of the prompt's."""


class Estimate(NamedTuple):
    """What is known about the tokens of a request before it runs."""

    prompt_bytes: int
    completion_limit: int | None
    """Tokens of one choice; None where the client sets no limit, 0 where nothing is generated."""
    num_choices: int = 1
    context_tokens: int | None = None
    """The context of its model, if that is known."""
    prompt_tokens: int | None = None
    """The tokens of its prompt, once somebody has counted them."""
    picture_tokens: int = 0
    """What its pictures take, beyond `prompt_bytes`."""

    @property
    def least_tokens(self) -> int:
        """A request with fewer tokens than this cannot be served."""
        if not self.prompt_bytes and not self.picture_tokens and not self.completion_limit:
            return 0
        return max(1, self.prompt_tokens or 0) + (0 if self.completion_limit == 0 else self.num_choices)

    def max_prompt_tokens(self, most: int) -> int:
        """The tokens of a prompt that has at most `most` tokens by its size: no prompt has more than the context."""
        if self.context_tokens is None or self.completion_limit == 0:
            return most
        return min(most, self.context_tokens * self.num_choices)

    @property
    def likely_tokens(self) -> int:
        """The prompt, by its size unless it was counted, and the limit of every choice or a default."""
        prompt = self.prompt_tokens
        if prompt is None:
            prompt = -(-self.prompt_bytes // BYTES_PER_TOKEN) + self.picture_tokens
        completion = DEFAULT_COMPLETION_TOKENS if self.completion_limit is None else self.completion_limit
        return prompt + completion * self.num_choices

    @property
    def most_tokens(self) -> int:
        """What it cannot exceed; `UNKNOWN` where neither a limit nor the context is known."""
        prompt_bytes, limit, num_choices, context, prompt, picture_tokens = self
        if limit == 0:
            return prompt_bytes + picture_tokens
        most = UNKNOWN if context is None else context * num_choices
        if limit is not None:
            most_prompt = prompt_bytes + picture_tokens + MAX_TEMPLATE_TOKENS if prompt is None else prompt
            by_limit = most_prompt + limit * num_choices
            if by_limit < most:
                return by_limit
        return most

    def reserved(self, left: int) -> int:
        """What it reserves of the tokens that are left to its key: all that it can use, up to half of what is left so
        that other requests of the key can run meanwhile, or what it likely uses where that is more."""
        most, half = self.most_tokens, left // 2
        if most <= half:
            return most
        likely = self.likely_tokens + (LIKELY_TEMPLATE_TOKENS if self.completion_limit != 0 else 0)
        return min(most, left, max(likely, half))
