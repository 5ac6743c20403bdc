"""How a model samples where a request says nothing: the table `sampling` of a model in both programs' files, the value
that gateway and node exchange, and what a model's own files recommend."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How the model samples where a request says nothing. What is absent here comes from the model's own files
    (`generation_config.json`, or the metadata of a GGUF file)."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 always takes the most likely token."""
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Draw from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Meta(ge=0)] | None = None
    """Draw from this many of the most likely tokens; 0: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this share of the most likely one."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """Divides the scores of tokens that were used before; 1 changes nothing."""

    @property
    def given(self) -> dict[str, float]:
        """The keys that have a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, and those of `other` where there are none."""
        return msgspec.structs.replace(other, **self.given)
