"""Streams token ids to text without splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """The text of one response. Constant work per token. Owned by one request.

    The joined results of the pushes and the flush do not depend on the split. Ids in `hidden` have no text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._spelled = tokenizer.vocabulary.token_bytes
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False
        """Bytes of an incomplete character are held back."""

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; bytes of an incomplete character are held back."""
        spelled = b"".join([self._spelled(i) for i in ids if i not in self._hidden])
        if not self._is_inside:
            try:
                return spelled.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(spelled)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The rest, after the last push: a replacement character if the last one is incomplete."""
        return self._decoder.decode(b"", final=True)
