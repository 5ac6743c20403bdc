"""A smaller model that drafts tokens for a larger one with the same tokenizer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.models.decoder import Decoder


class DraftModel:
    """Computes every token of the larger model's steps, in pages of its own with the same ids. See `Proposer`."""

    starts_from_hidden = False

    def __init__(self, model: Decoder, vocab: int) -> None:
        """`vocab`: of the larger model. The matrices of either may have rows that are no tokens."""
        self.model = model
        self.group = model.parameters.group
        self._vocab = min(vocab, model.config.vocab)

    @property
    def carried_size(self) -> int:
        return self.model.config.hidden

    def absorb(self, following: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        del following, hidden
        return self._computed(batch.tokens, batch)

    def extend(self, tokens: Tensor, carried: Tensor, batch: Batch) -> Tensor:
        del carried
        return self._computed(tokens, batch)

    def logits(self, carried: Tensor) -> Tensor:
        return self.model.logits(carried)[:, : self._vocab].contiguous()

    def _computed(self, tokens: Tensor, batch: Batch) -> Tensor:
        """It sees no pictures: the tokens in their places are as many."""
        known = tokens.clamp(max=self.model.config.vocab - 1)
        return self.model(replace(batch, tokens=known, rope=None, pictures=None, reach=None))
