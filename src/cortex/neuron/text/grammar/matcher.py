"""Matches output against a grammar: which tokens are allowed next. The engine uses it, so it imports on a bare host.

The grammar library is imported with the first grammar; without it, everything except constrained output works.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cortex.neuron.text.errors import GrammarRejected
from cortex.neuron.text.tokenizer.library import LibraryTokenizer

if TYPE_CHECKING:
    import llguidance
    import numpy
    import torch

    MaskRow = numpy.ndarray[Any, numpy.dtype[numpy.int32]] | torch.Tensor


_MAX_KEPT = 32
_MAX_KEPT_CHARACTERS = 2 << 20
"""The length of all kept grammars: two of the largest accepted ones. Compiled, a character takes about 45 bytes."""
_APART: Final = "\ufdd0"
"""A noncharacter: no vocabulary has a token of it."""
_MAX_ABSENT: Final = 4096
"""The most ids without a token that are filled. With tens of thousands, reading the vocabulary takes minutes."""


class Matcher:
    """Compiles grammars for one model's vocabulary. Safe to use from any thread.

    The first `compile` reads the vocabulary, up to a second for a large one. Later ones take milliseconds, or seconds
    for a large grammar, without the interpreter's lock. The latest grammars are kept, so that compiling one of them
    again for the same tenant takes almost nothing.
    """

    def __init__(self, source: Path, vocab_size: int) -> None:
        """`source`: the model's directory or GGUF file. `vocab_size`: the number of logits, including padding."""
        self._source = source
        self.vocab_size = vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[bytes, str], llguidance.LLMatcher] = OrderedDict()
        """States before the first token, by tenant and grammar; the least recently used first."""

    @property
    def mask_words(self) -> int:
        """int32 words in one row of a mask: a bit per token, the first token in the lowest bit."""
        return -(-self.vocab_size // 32)

    def compile(self, grammar: str, tenant: bytes = b"") -> MatchState:
        """The state of one new output; raises GrammarRejected, or TextModelError if the vocabulary cannot be read."""
        try:
            import llguidance
        except ImportError as error:
            what = (
                "constrained output needs the package llguidance: run `pip install '.[neuron]'` in a checkout of cortex"
            )
            raise GrammarRejected(what) from error
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            if (compiled := self._compiled.get((tenant, grammar))) is not None:
                self._compiled.move_to_end((tenant, grammar))
                return MatchState(compiled.deep_copy(), self.mask_words)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarRejected(f"the grammar does not compile for this model: {_reason(matcher)}")
        with self._lock:
            self._keep((tenant, grammar), matcher.deep_copy())
        return MatchState(matcher, self.mask_words)

    def _keep(self, key: tuple[bytes, str], compiled: llguidance.LLMatcher) -> None:
        self._compiled[key] = compiled
        self._compiled.move_to_end(key)
        while len(self._compiled) > _MAX_KEPT or self._num_characters > _MAX_KEPT_CHARACTERS:
            self._compiled.popitem(last=False)

    @property
    def _num_characters(self) -> int:
        return sum(len(grammar) for _, grammar in self._compiled)

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        tokenizer = LibraryTokenizer.load(self._source)
        if tokenizer.vocab_size > self.vocab_size:
            raise GrammarRejected(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {self.vocab_size}; "
                "constrained output needs a tokenizer that belongs to the model"
            )
        ends = [end for end in tokenizer.eos_ids if 0 <= end < tokenizer.vocab_size]  # a config may name others, too
        try:
            return llguidance.LLTokenizer(_described(tokenizer), n_vocab=self.vocab_size, eos_token=ends or None)
        except ValueError as error:
            raise GrammarRejected(f"constrained output does not work with this model's tokenizer: {error}") from error


class MatchState:
    """The state of one output in its grammar. Owned by the engine thread.

    Once the grammar is satisfied and allows nothing more, only end tokens are allowed, and `is_finished` is true.
    """

    def __init__(self, matcher: llguidance.LLMatcher, mask_words: int) -> None:
        self.matcher = matcher
        self._mask_words = mask_words

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow, or has followed already."""
        return self.matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return self.matcher.is_accepting()

    def fill_mask(self, row: MaskRow) -> None:
        """Writes the allowed next tokens into `row`: `mask_words` int32, contiguous, in host memory."""
        size = len(row)
        if size != self._mask_words:
            raise ValueError(f"the mask row has {size} words, this vocabulary needs {self._mask_words}")
        # Both array types expose their address; the library fills them in place without the GIL.
        address = row.data_ptr() if hasattr(row, "data_ptr") else row.ctypes.data
        self.matcher.unsafe_compute_mask_ptr(address, size * 4)
        self.check()

    @staticmethod
    def fill_masks(states: Sequence[MatchState], rows: torch.Tensor) -> None:
        """As `fill_mask`, of several states at once, in threads of the library and without the GIL; what goes wrong
        shows in the state. rows: [states, words] int32, contiguous"""
        matchers = [(state.matcher, index) for index, state in enumerate(states)]
        _executor().unsafe_compute_mask_ptr(matchers, rows.data_ptr(), rows.shape[1] * 4, len(states))

    def check(self) -> None:
        """Raises GrammarRejected if the last mask could not be computed."""
        if self.matcher.is_error():
            raise GrammarRejected(f"the grammar became too complex, simplify it: {_reason(self.matcher)}")

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens of the text that must come next, if there is only one."""
        return () if self.matcher.is_stopped() else tuple(self.matcher.compute_ff_tokens())

    def copy(self) -> MatchState:
        """An independent state; takes some microseconds."""
        return MatchState(self.matcher.deep_copy(), self._mask_words)

    def accept(self, token: int) -> None:
        """Accepts `token`; raises GrammarRejected if the mask did not allow it."""
        if not self.matcher.consume_token(token):
            raise GrammarRejected(f"the drawn token {token} does not fit the grammar; send the request again")


@cache
def _executor() -> llguidance.LLExecutor:
    """The threads that compute masks, of this process."""
    import llguidance

    return llguidance.LLExecutor()


def _described(tokenizer: LibraryTokenizer) -> str:
    """The tokenizer as the grammar library reads it: with one spelling per id, and without gaps between ids.

    It counts spellings to know which ids exist, and gives a control token the id of a word that is spelled alike. Such
    a control token is therefore spelled differently for it, and an id without a token gets one that no grammar allows,
    unless too many have none.
    """
    described = tokenizer.backend.to_str()
    if tokenizer.backend.get_vocab_size(with_added_tokens=True) == tokenizer.vocab_size:
        return described
    content = json.loads(described)
    ids, added = content["model"]["vocab"], content["added_tokens"]
    if not isinstance(ids, dict):  # Unigram lists its tokens in the order of their ids
        return described
    for token in added:
        if ids.get(token["content"], token["id"]) != token["id"]:
            token["content"] += f"{_APART}{token['id']}"
        ids[token["content"]] = token["id"]
    all_absent = sorted({*range(tokenizer.vocab_size)} - {*ids.values()})
    for absent in all_absent if len(all_absent) <= _MAX_ABSENT else ():
        ids[f"{_APART}{absent}"] = absent
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": absent, "content": f"{_APART}{absent}", "special": True, **flags})
    return json.dumps(content, ensure_ascii=False)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's reason, without the dump of its parser state and of the grammar."""
    return matcher.get_error().partition("<state>")[0].strip()
