"""Prompts that come again: all of their tokens but the last are reused, although these end inside a page.

The page in which a prompt ended is named by the tail of the prompt: the prefix up to, and without, its last token. The
same prompt gets a copy of that page and computes its last token alone. The page need not be kept for this: its sequence
appends to it, and its first positions stay what they are until the page is used for something else.

Prompts that have no full page before that, or end with a picture, have no tail.

A model with recurrent layers also needs the state before the last token. It is saved when a prompt continues from its
last page end, with what a step computes anyway, because most prompts never come again. Pure bookkeeping.
"""

from __future__ import annotations

from cortex.neuron.engine.kv.page_groups import KVPages, TailPages
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import StepDraft


class PromptTails:
    """Belongs to the engine thread."""

    def __init__(self, pages: KVPages, checkpoints: RecurrentCheckpoints | None) -> None:
        self._pages = pages
        self._checkpoints = checkpoints
        self._copied: list[TailPages] = []
        """What the step that is being planned copies: nothing else gets these pages before it."""

    def resume(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Continues a sequence, which has just got its row and its cached pages, with the last token of its prompt if
        its tail is known. True: it does, the step copies a page for it, and the caller restores the state of its
        tail."""
        last = len(sequence.request.prompt) - 1
        is_next = sequence.committed == last // self._pages.page_tokens and len(sequence.tokens) == last + 1
        if sequence.tail is None or not is_next or sequence.scores_prompt or sequence.tail in draft.being_computed:
            return False
        if self._checkpoints is not None and not self._checkpoints.knows(sequence.tail):
            return False
        sources = self._pages.hold_tail(sequence.tail)
        if sources is None:
            return False
        added = self._pages.extend(sequence.pages, last + 1)
        if added is None:
            self._pages.release_tail(sources)
            return False
        self._copied.append(sources)
        draft.new_pages += [(sequence.row, *pages) for pages in added]
        draft.page_copies += [(group, sources[group], pages[0]) for group, _, pages in added]
        sequence.computed = last
        return True

    def commit(self, sequence: Sequence, draft: StepDraft) -> None:
        """Names the page in which the prompt ends, once the positions before its last token are computed. To be called
        after each chunk of the prompt, the last row of the draft, when its states have their slots."""
        last, page_tokens = len(sequence.request.prompt) - 1, self._pages.page_tokens
        if sequence.tail is None or not draft.rows[-1].start < last <= sequence.scheduled:
            return
        if self._checkpoints is None:
            is_needed = (last + 1) % page_tokens > 0  # else the prompt ends with a page, which needs no other name
        else:
            is_needed = self._checkpoints.knows(sequence.tail)
        if is_needed:
            self._pages.commit_tail(sequence.pages, last // page_tokens, sequence.tail)
            draft.being_computed.add(sequence.tail)

    def end_step(self) -> bool:
        """The step is planned. The device runs steps in order, so that the copied pages can be used again. True: there
        are such pages."""
        released, self._copied = self._copied, []
        for pages in released:
            self._pages.release_tail(pages)
        return bool(released)
