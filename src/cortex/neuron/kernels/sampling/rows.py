"""The sampling options of each row in device memory, and what they do to the logits.

A step only names the rows that draw, so it makes no tensor of options. Every kernel computes the adjusted logits from
the model's own again: reading logits twice is cheaper than keeping a second copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.kernels.jit import constant, jit, tl

# The columns of the table.
FLAGS = constant(0)
TEMPERATURE = constant(1)
TOP_P = constant(2)
LOG_MIN_P = constant(3)
PRESENCE = constant(4)
FREQUENCY = constant(5)
REPETITION = constant(6)
TOP_K = constant(7)
SEED = constant(8)
WINDOW = constant(9)
NUM_EDITS = constant(10)
WIDTH = constant(16)

# The flags of a row: which of its options are not neutral.
SAMPLED = constant(1)
CUT = constant(2)  # top-k or top-p
MIN_P = constant(4)
EDITED = constant(8)
RESTRICTED = constant(16)
PENALISED = constant(32)
LOGPROBS = constant(64)
TOP_LOGPROBS = constant(128)
ADJUSTING = 8 | 16 | 32  # edited, restricted or penalised: the flags that change logits

DRAWN = constant(1)  # what a drawn token adds to its tally
SEEN = constant(1 << 16)
MOST = constant(0xFFFF)

FOREVER = (1 << 31) - 1
"""The position up to which an edit holds if it always does."""


def number(column: Any) -> int:
    """The value of one of the constants above outside of kernels."""
    value: int = getattr(column, "value", column)
    return value


@dataclass(frozen=True, slots=True)
class RowOptions:
    """One row of the table. The defaults draw the argmax."""

    flags: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    log_min_p: float = float("-inf")
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    top_k: int = 0
    seed: int = 0
    window: int = 0
    """Number of latest tokens that the repetition penalty applies to; 0: all."""
    num_edits: int = 0

    def line(self) -> NDArray[np.int64]:
        line = np.zeros(number(WIDTH), np.int64)
        line[number(FLAGS)] = self.flags
        floats = (self.temperature, self.top_p, self.log_min_p, self.presence, self.frequency, self.repetition)
        line[number(TEMPERATURE) : number(REPETITION) + 1] = np.array(floats, np.float32).view(np.int32)
        line[number(TOP_K)], line[number(SEED)] = self.top_k, self.seed
        line[number(WINDOW)], line[number(NUM_EDITS)] = self.window, self.num_edits
        return line


@dataclass(frozen=True, slots=True)
class RowTables:
    """The tables of all rows that kernels read. An unused table has one element."""

    options: Tensor
    """[rows, WIDTH] int64; floats are in the lower half of their element."""
    edits: Tensor
    """[rows, 3, capacity] int32: tokens in ascending order, what is added to their logits (float32), and the position
    from which this is no longer added."""
    allowed: Tensor
    """[rows, words] int32: a bit for each token that may be drawn."""
    tally: Tensor
    """[rows, vocab] int32. Lower half: how often a token was drawn. Upper half: how often it is in the window of the
    repetition penalty, or 1 if the window is endless. Both stop at 65,535."""
    history: Tensor
    """[rows, context] int32: prompt and output by position, for rows with a window."""
    vocab: int

    @property
    def num_words(self) -> int:
        return -(-self.vocab // 32)


# The columns of a draw.
INDEX = constant(0)
ROW = constant(1)
POSITION = constant(2)
FIRST = constant(3)
DRAFTED = constant(4)
MASKED_BY = constant(5)
COLUMNS = constant(6)


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of one step. A row may draw several times: each draw but the last checks a draft token, which the next
    one follows."""

    lines: Tensor
    """[draws, COLUMNS] int64: the row of the logits; whose options apply; the position of the latest token; the first
    draw of the same row; the draft token that is checked, or -1; the row of `mask`, or -1."""
    mask: Tensor
    """[masked draws, words] int32: a bit for each token that the grammar allows."""

    is_masked: bool = False
    """Whether a draw has a grammar."""

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def index(self) -> Tensor:
        return self.lines[:, number(INDEX)].contiguous()

    @property
    def rows(self) -> Tensor:
        return self.lines[:, number(ROW)].contiguous()


def word_mask(tokens: Iterable[int], vocab: int) -> NDArray[np.int32]:
    """[words]: the bits of `tokens`."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """[rows, words] int32 → [rows, vocab] bool"""
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bit) & 1).flatten(1)[:, :vocab].bool()


@jit
def of_draw(draws, draw, column):
    return tl.load(draws + draw * COLUMNS + column)


@jit
def float_option(table, row, column):
    return tl.load(table + row * WIDTH + column).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def _holds(words, line, token, is_token):
    """Whether the bit of each token is set."""
    word = tl.load(words + line + token // 32, mask=is_token, other=0)
    return ((word >> (token % 32)) & 1) != 0


@jit
def _edited(x, token, row, position, table, edits, capacity):
    """Adds what the row's edits say. Few of them concern one block of tokens."""
    own = edits + row * 3 * capacity
    count = tl.load(table + row * WIDTH + NUM_EDITS).to(tl.int32)
    low = tl.min(token, 0)
    high = tl.max(token, 0)
    start = 0
    end = 0
    for base in range(0, count, 512):
        entry = base + tl.arange(0, 512)
        known = tl.load(own + entry, mask=entry < count, other=2147483647)
        start += tl.sum((known < low).to(tl.int32), 0)
        end += tl.sum((known <= high).to(tl.int32), 0)
    for entry in range(start, end):
        value = tl.load(own + capacity + entry).to(tl.float32, bitcast=True)
        holds = (token == tl.load(own + entry)) & (position < tl.load(own + 2 * capacity + entry))
        x = tl.where(holds, x + value, x)
    return x


@jit
def _penalised(x, token, is_token, draw, row, draws, table, tally, history, context, vocab):
    """Subtracts penalties for the tokens so far, and for the draft tokens before this draw."""
    first = of_draw(draws, draw, FIRST)
    position = of_draw(draws, draw, POSITION)
    window = tl.load(table + row * WIDTH + WINDOW)
    tallied = tl.load(tally + row * vocab + token, mask=is_token, other=0)
    begin = position - (draw - first)
    for before in range(first, draw):
        tallied += tl.where(token == of_draw(draws, before, DRAFTED), DRAWN + SEEN, 0)
        left = begin + (before - first) + 1 - window
        if (window > 0) & (left >= 0):
            if left <= begin:
                gone = tl.load(history + row * context + left).to(tl.int64)
            else:
                gone = of_draw(draws, first + left - begin - 1, DRAFTED)
            tallied -= tl.where(token == gone, SEEN, 0)
    count = (tallied & MOST).to(tl.float32)
    is_seen = ((tallied >> 16) & MOST) != 0
    repetition = float_option(table, row, REPETITION)
    x = x - float_option(table, row, FREQUENCY) * count
    x = tl.where(count > 0, x - float_option(table, row, PRESENCE), x)
    return tl.where(is_seen, tl.where(x > 0, x / repetition, x * repetition), x)


@jit
def adjusted(
    x, token, is_token, draw, row, flags, draws, mask, table, edits, allowed, tally, history, capacity, context, vocab,
    ADJUSTS: tl.constexpr,
):  # fmt: skip
    """The logits `x` of a block of tokens after grammar mask, allowed tokens, edits and penalties. `ADJUSTS`: whether
    any row of the batch has those; without, a kernel needs half the registers."""
    if ADJUSTS:
        num_words = (vocab + 31) // 32
        masked_by = of_draw(draws, draw, MASKED_BY)
        if masked_by >= 0:
            x = tl.where(_holds(mask, masked_by * num_words, token, is_token), x, float("-inf"))
        if flags & RESTRICTED:
            x = tl.where(_holds(allowed, row * num_words, token, is_token), x, float("-inf"))
        if flags & EDITED:
            x = _edited(x, token, row, of_draw(draws, draw, POSITION), table, edits, capacity)
        if flags & PENALISED:
            x = _penalised(x, token, is_token, draw, row, draws, table, tally, history, context, vocab)
    return tl.where(x == 0, 0.0, x)  # one zero, also in the order of cuts


def adjusted_arguments(draws: Draws, tables: RowTables) -> tuple[object, ...]:
    """The arguments of `adjusted` from `draws` on."""
    return (
        draws.lines,
        draws.mask,
        tables.options,
        tables.edits,
        tables.allowed,
        tables.tally,
        tables.history,
        tables.edits.shape[-1],
        tables.history.shape[-1],
        tables.vocab,
    )
