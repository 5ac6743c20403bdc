from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cortex.neuron.engine.speculation import suffix_match
from cortex.neuron.engine.speculation.drafter import Drafter


def test_draft_is_no_longer_than_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    draft = Drafter(text).draft(8)
    assert draft.kind == "lookup"
    assert draft.tokens == (4, 5, 6)
    assert list(draft.odds) == sorted(draft.odds, reverse=True)


def test_prediction_is_drafted_from_its_first_token() -> None:
    draft = Drafter([1, 2, 3], (7, 8, 9, 10)).draft(3)
    assert (draft.kind, draft.tokens) == ("prediction", (7, 8, 9))


def test_odds_fall_where_drafts_are_wrong_and_rise_where_they_are_right() -> None:
    draw = random.Random(0)
    misleading = [token for _ in range(40) for token in (1, 2, 3, 4, draw.randrange(100, 1000))]
    text = [1, 2, 3, 4]
    drafter = Drafter(text)
    drafter.draft(1)
    for token in misleading:
        text.append(token)
        drafter.draft(1)
    text += [1, 2, 3, 4]
    assert sum(drafter.draft(4).odds[:1]) < 0.35
    text += [5, 6, 7] * 30
    assert drafter.draft(1).odds[0] > 0.9


def test_only_new_tokens_of_the_prediction_are_counted() -> None:
    text = [1]
    drafter = Drafter(text, (5, 6, 7, 8), is_on=False)
    text += [5, 6]
    assert drafter.follow_prediction() == 2
    text += [9, 8]
    assert drafter.follow_prediction() == 1
    assert drafter.follow_prediction() == 0


def test_prediction_is_indexed_when_it_is_followed_and_only_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed: list[int] = []

    class Counted(suffix_match.NGrams):
        def __init__(self, order: int, corpus: Sequence[int]) -> None:
            indexed.append(len(corpus))
            super().__init__(order, corpus)

    monkeypatch.setattr(suffix_match, "NGrams", Counted)
    text, other = [1], [1]
    on, off = Drafter(text, (5, 6, 7, 8)), Drafter(other, (5, 6, 7, 8), is_on=False)
    assert indexed == []
    other += [5, 6, 9, 8]
    assert off.follow_prediction() == 3
    assert indexed == []
    text += [5, 6]
    assert on.follow_prediction() == 2
    assert set(indexed) == {4}


def test_many_unfollowed_tokens_are_caught_up_with() -> None:
    text = [1, 2, 3]
    drafter = Drafter(text)
    drafter.draft(1)
    text += [random.Random(1).randrange(1000, 9000) for _ in range(500)]
    text += [1, 2, 3][:2]
    assert drafter.draft(3).tokens[:1] == (3,)
