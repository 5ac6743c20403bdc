"""Matches output against a grammar: which tokens are allowed next. The engine uses it, so it imports on a bare host.

The grammar library is imported with the first grammar; without it, everything except constrained output works.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from cortex.neuron.text.errors import GrammarRejected, GrammarUnspellable
from cortex.neuron.text.grammar.trial import MAX_TOKEN_BYTES
from cortex.neuron.text.tokenizer.library import LibraryTokenizer

if TYPE_CHECKING:
    import llguidance
    import numpy
    import torch

    MaskRow = numpy.ndarray[Any, numpy.dtype[numpy.int32]] | torch.Tensor


_MAX_KEPT = 32
_MAX_KEPT_CHARACTERS = 2 << 20
"""Limit for the length of all kept grammars: two of the largest accepted ones. A compiled character takes about 45
bytes."""
SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    r"[a-z ]{1,30}",
    r"[a-zA-Z ]{1,30}",
    r"[a-zA-Z0-9_]{1,30}",
    r"""[^"\\\x00-\x1F\x7F]{1,10}""",
    r"""[^"\\\x00-\x1F\x7F]{1,30}""",
    r"""[^"\\\x00-\x1F\x7F]+""",
)
"""Classes of tokens that a state may allow as a whole, without a look at each token. The library's own classes are for
strings in JSON; with classes of words, a mask of a regular expression takes a tenth of the time. Masks are the same."""
_APART: Final = "\ufdd0"
"""A noncharacter: no vocabulary has a token of it."""
_UNSPELLABLE: Final = (
    "no token of this model's vocabulary spells what the format of the output needs next; ask for another format, or "
    "use another model"
)


class Matcher:
    """Compiles grammars for one model's vocabulary. Safe to use from any thread.

    The first `compile` reads the vocabulary, up to a second for a large one. Later ones take milliseconds, or seconds
    for a large grammar, without the interpreter's lock. The latest grammars are kept, so that compiling one of them
    again for the same tenant takes almost nothing.
    """

    def __init__(self, source: Path, vocab_size: int, slices: Sequence[str] = SLICES) -> None:
        """`source`: the model's directory or GGUF file. `vocab_size`: the number of logits, including padding."""
        self._source = source
        self.vocab_size = vocab_size
        self._slices = slices
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._spells_all = True
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
                return self._state(compiled.deep_copy())
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarRejected(f"the grammar does not compile for this model: {_reason(matcher)}")
        with self._lock:
            self._keep((tenant, grammar), matcher.deep_copy())
        return self._state(matcher)

    def _state(self, matcher: llguidance.LLMatcher) -> MatchState:
        return MatchState(matcher, self.mask_words, spells_all=self._spells_all)

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
        tokens = _Tokens(tokenizer, self.vocab_size)
        self._spells_all = {bytes([byte]) for byte in range(256)} <= set(tokens.tokens)
        wrapped = cast("llguidance.TokenizerWrapper", tokens)
        return llguidance.LLTokenizer(wrapped, eos_token=_ends(tokenizer) or None, slices=list(self._slices))


class MatchState:
    """The state of one output in its grammar. Owned by the engine thread.

    Once the grammar is satisfied and allows nothing more, only end tokens are allowed, and `is_finished` is true.
    """

    def __init__(self, matcher: llguidance.LLMatcher, mask_words: int, *, spells_all: bool) -> None:
        """`spells_all`: whether the vocabulary has a token for each byte."""
        self.matcher = matcher
        self._mask_words = mask_words
        self._spells_all = spells_all

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
    def fill_masks(states: Sequence[tuple[MatchState, Sequence[int]]], rows: torch.Tensor) -> None:
        """The allowed next tokens of several states, and after each of the draft tokens of a state, which it must allow
        without an end. In threads of the library and without the GIL. Raises GrammarRejected if one of them failed.

        rows: [states + draft tokens, words] int32, contiguous; those of a state that failed are undefined.
        """
        single, drafting, index = [], [], 0
        for state, drafted in states:
            if drafted:
                drafting.append((state.matcher, index, list(drafted)))
            else:
                single.append((state.matcher, index))
            index += 1 + len(drafted)
        address, row_bytes = rows.data_ptr(), rows.shape[1] * 4
        if single:
            _executor().unsafe_compute_mask_ptr(single, address, row_bytes, len(rows))
        if drafting:
            _executor().unsafe_compute_mask_ptr_with_draft_token(drafting, address, row_bytes, len(rows))
        for state, _ in states:
            state.check()

    def check(self) -> None:
        """Raises GrammarRejected if the last mask could not be computed, GrammarUnspellable if it would be empty."""
        if self.matcher.is_error():
            if _reason(self.matcher).startswith("NoExtension"):
                raise GrammarUnspellable(_UNSPELLABLE)
            raise GrammarRejected(f"the grammar became too complex, simplify it: {_reason(self.matcher)}")

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens of the text that must come next, if there is only one."""
        return () if self.matcher.is_stopped() else tuple(self.matcher.compute_ff_tokens())

    def copy(self) -> MatchState:
        """An independent state; takes some microseconds."""
        return MatchState(self.matcher.deep_copy(), self._mask_words, spells_all=self._spells_all)

    def accept(self, token: int) -> None:
        """Accepts `token`; raises GrammarRejected if the mask did not allow it, or GrammarUnspellable."""
        self.check_accepted(token, self.matcher.consume_token(token))

    @staticmethod
    def accept_all(tokens: Sequence[tuple[MatchState, int]]) -> list[bool]:
        """As `accept`, for several states at once, in threads of the library. False: the mask did not allow a token."""
        return list(_executor().consume_token_par([(state.matcher, token) for state, token in tokens]))

    def check_accepted(self, token: int, is_accepted: bool) -> None:
        if not is_accepted:
            if not self._spells_all:  # the library skips forced text without tokens, so its mask is of what follows
                raise GrammarUnspellable(_UNSPELLABLE)
            raise GrammarRejected(f"the drawn token {token} does not fit the grammar; send the request again")


@cache
def _executor() -> llguidance.LLExecutor:
    """The threads of this process that compute masks."""
    import llguidance

    return llguidance.LLExecutor()


class _Tokens:
    """The vocabulary for the grammar library: the bytes of each id, and how text is tokenised."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: LibraryTokenizer, num_ids: int) -> None:
        vocabulary = tokenizer.vocabulary
        self._tokenizer = tokenizer
        self._token_bytes = vocabulary.token_bytes
        self._is_context_free = vocabulary.is_context_free
        self.special_token_ids = [token.id for token in vocabulary.whole_tokens if token.is_special]
        self._special = frozenset(self.special_token_ids)
        # The library needs an end token. Without one, an id that no text contains takes its place.
        padding = range(vocabulary.size, num_ids)
        self.eos_token_id = next(chain(_ends(tokenizer), padding, self.special_token_ids, (num_ids - 1,)))
        # An id without bytes is never allowed.
        each_spelling = map(vocabulary.token_bytes, range(num_ids))
        self.tokens = [spelled if len(spelled) <= MAX_TOKEN_BYTES else b"" for spelled in each_spelling]

    def __call__(self, text: str) -> list[int]:
        """The tokens that continue an output with `text`: only the first of them is allowed where no other text is."""
        if self._is_context_free:
            ids = self._tokenizer.encode(text)
        else:
            found = self._tokenizer.encoding(_APART + text)
            ids = [token for token, (start, _) in zip(found.ids, found.offsets, strict=True) if start > 0]
        spelled = text.encode()
        is_text = self._special.isdisjoint(ids) and b"".join(map(self._token_bytes, ids)) == spelled
        return ids if is_text else self._longest_first(spelled)

    def _longest_first(self, spelled: bytes) -> list[int]:
        """The longest token at each place, for texts that the tokenizer changes, and the texts of control tokens."""
        ids: list[int] = []
        start = 0
        while start < len(spelled):
            ends = range(min(len(spelled), start + self._longest), start, -1)
            end = next((end for end in ends if spelled[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[spelled[start:end]])
            start = end
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def _ends(tokenizer: LibraryTokenizer) -> list[int]:
    """The end tokens in the vocabulary: a config may also name others."""
    return [end for end in tokenizer.eos_ids if 0 <= end < tokenizer.vocab_size]


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's reason, without the dump of its parser state and of the grammar."""
    return matcher.get_error().partition("<state>")[0].strip()
