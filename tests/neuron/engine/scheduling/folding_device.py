"""A device whose model folds its tokens into a state, for schedulers that are run without an engine."""

from __future__ import annotations

from cortex.neuron.engine.scheduling.step_plan import StepPlan

VOCAB = 3
Tokens = tuple[int, ...]
GARBAGE: Tokens = (-1,)


def next_token(past: Tokens) -> int:
    return hash(("next", past)) % VOCAB


class FoldingDevice:
    """The state of a prefix is the prefix itself, and so is the KV of its last position, so that every mix-up shows. So
    does what a row takes of another tenant."""

    def __init__(self, page_tokens: int) -> None:
        self.slots: dict[int, Tokens] = {}
        self.last_tokens: dict[int, int] = {}
        self._page_tokens = page_tokens
        self._tables: dict[int, dict[int, int]] = {}
        """By row: the page at each index."""
        self._kv: dict[tuple[int, int], Tokens] = {}
        """By page and position within it."""
        self._tenants: dict[int, bytes] = {}
        """By row."""
        self._tenant_of: dict[int | tuple[int, int], bytes] = {}
        """Whose the content of a slot is, and of a position in a page."""

    def launch(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """The tokens that each row drew."""
        written = [*(row.row for row in plan.rows), *plan.written_slots]
        copied = [slot for _, slot in plan.restores]
        assert all(written.count(slot) == 1 or slot in copied for slot in written), "two states for one slot"
        for saved, restored in plan.restores:
            self.slots[restored] = self.slots[saved]
            self._tenant_of[restored] = self._tenant_of[saved]
        self._place(plan)
        for _, source, page in plan.page_copies:
            for offset in range(self._page_tokens):
                self._kv[page, offset] = self._kv.get((source, offset), GARBAGE)
                self._tenant_of[page, offset] = self._tenant_of.get((source, offset), b"")
        drawn = []
        for row in plan.rows:
            past = self.slots[row.row] if row.start else ()
            assert len(past) == row.start, "a row goes on from the state of another position"
            assert row.writes, "a state cannot take in a token twice"
            tenant = self._tenants[row.row]
            assert not row.start or self._tenant_of[row.row] == tenant, "a row goes on from the state of another tenant"
            self._tenant_of[row.row] = tenant
            for position in range(row.start):
                place = self._slot(row.row, position)
                assert self._kv[place] == past[: position + 1], "a row attends to other tokens"
                assert self._tenant_of[place] == tenant, "a row attends to tokens of another tenant"
            tokens = (self.last_tokens[row.row],) if row.inputs.tokens is None else row.inputs.tokens
            for position, end in enumerate(range(row.start + 1, row.start + row.count + 1), row.start):
                self._kv[self._slot(row.row, position)] = (past + tokens)[:end]
                self._tenant_of[self._slot(row.row, position)] = tenant
            if row.cut is not None:
                assert 0 < row.cut.num_tokens < row.count
                self._tenant_of[row.cut.slot] = tenant
                self.slots[row.cut.slot] = past + tokens[: row.cut.num_tokens]
            past = self.slots[row.row] = past + tokens
            self.last_tokens[row.row] = next_token(past)
            ends = range(len(past) - row.outputs.draws + 1, len(past) + 1)
            given = tuple(next_token(past[:end]) for end in ends)
            drawn.append(given[: row.num_accepted(given)])
        for source, slot in plan.saves:
            self.slots[slot] = self.slots[source]
            self._tenant_of[slot] = self._tenant_of[source]
        return drawn

    def fail(self, plan: StepPlan) -> None:
        """A failed step: everything that it was to write is garbage."""
        for slot in [*(row.row for row in plan.rows), *plan.written_slots]:
            self.slots[slot] = GARBAGE
        self._place(plan)
        for row in plan.rows:
            self._kv.update({self._slot(row.row, row.start + count): GARBAGE for count in range(row.count)})
        for _, _, page in plan.page_copies:
            self._kv.update({(page, place): GARBAGE for place in range(self._page_tokens)})

    def _place(self, plan: StepPlan) -> None:
        for row, request, _ in plan.new_rows:
            self._tables[row] = {}
            self._tenants[row] = request.tenant
        for row, _, first, pages in plan.new_pages:
            self._tables[row].update(enumerate(pages, first))

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        index, place = divmod(position, self._page_tokens)
        return self._tables[row][index], place
