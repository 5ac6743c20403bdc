"""Token ids to text as they come, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. Constant work per token; owned by one request.

    Whatever the split, the pushes and the flush join to the text of all ids. Ids in `hidden` say nothing.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; bytes of an unfinished character wait."""
        spelled = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(spelled(i) for i in ids if i not in self._hidden))

    def flush(self) -> str:
        """What is left when no more ids come: a replacement character if the last one is unfinished."""
        return self._decoder.decode(b"", final=True)
