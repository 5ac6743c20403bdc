"""Text to token ids and back: a vocabulary in this process, and an encoder that may be in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cortex.neuron.text.tokenizer.encoder import Segmented, TextEncoder
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class Tokenizer:
    """Immutable and safe to share between threads. Do not call the `encode` methods on the event loop."""

    vocabulary: Vocabulary
    encoder: TextEncoder

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        return self.vocabulary.size

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` and similar: variables that chat templates expect."""
        return self.vocabulary.named_tokens

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, from the model's own files, in their order."""
        return self.vocabulary.eos_ids

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are not part of a response's text."""
        return frozenset(token.id for token in self.vocabulary.whole_tokens if token.is_special)

    def whole_id(self, text: str) -> int | None:
        """The id of the whole token with exactly this text."""
        return self._whole_ids.get(text)

    def has_whole(self, text: str) -> bool:
        """Whether a whole token has exactly this text."""
        return text in self._whole_ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, including control tokens in it; adds no token."""
        return self.encoder.encode(text)

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document, with the begin and end tokens that the model was trained with."""
        return self.encoder.encode_document(text)

    def encode_segmented(self, text: str, literal_at: Sequence[int] = (), tenant: bytes = b"") -> Segmented:
        """Like `encode`, with the positions of cuts around whole tokens; none begins at a character in `literal_at`.
        `tenant`: whose text it is."""
        return self.encoder.encode_segmented(text, literal_at, tenant)

    def min_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`, from its length alone."""
        most = self.vocabulary.characters_per_token
        if most is None:
            return 0
        return -(-(len(text) - sum(map(text.count, self.vocabulary.silent_characters))) // most)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` as a continuation: control tokens are spelled out, a leading space is kept."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps part of a character; empty for an id outside the vocabulary."""
        return self.vocabulary.token_bytes(token_id)

    @cached_property
    def _whole_ids(self) -> dict[str, int]:
        return {token.text: token.id for token in self.vocabulary.whole_tokens}
