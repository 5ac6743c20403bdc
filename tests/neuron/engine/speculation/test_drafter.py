from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.speculation import drafter
from cortex.neuron.engine.speculation.drafter import MAX_MATCH, Drafter, SuffixMatch

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def longest_suffix(text: list[int]) -> int:
    """How long the longest suffix is that occurs earlier in the text, from two tokens on."""
    for length in range(min(len(text) - 1, MAX_MATCH), 1, -1):
        suffix = text[-length:]
        if any(text[start : start + length] == suffix for start in range(len(text) - length)):
            return length
    return 0


@given(prompt=TOKENS, output=TOKENS)
def test_place_follows_an_earlier_occurrence_of_the_latest_tokens(prompt: list[int], output: list[int]) -> None:
    text = list(prompt)
    lookup = SuffixMatch(text, text)
    for token in [None, *output]:
        if token is not None:
            expected = lookup.draft(1)
            text.append(token)
            assert lookup.advance() == (expected[0] == token if expected else None)
        if lookup.place is None:
            assert longest_suffix(text) == 0
        else:
            assert 0 < lookup.length <= longest_suffix(text)
            assert lookup.place < len(text)
            assert text[lookup.place - lookup.length : lookup.place] == text[len(text) - lookup.length :]


@pytest.mark.parametrize("copied", [5, 30, 200])
def test_finds_the_longest_match_among_few(copied: int) -> None:
    draw = random.Random(copied)
    prompt = [draw.randrange(50_000) for _ in range(2_000)]
    text = prompt + prompt[700 : 700 + copied]
    lookup = SuffixMatch(text, text)
    assert lookup.place == 700 + copied
    assert lookup.length == min(copied, MAX_MATCH)
    assert lookup.draft(4) == tuple(prompt[700 + copied : 704 + copied])


def test_skipped_tokens_are_found_later() -> None:
    text = [1, 2, 3, 4, 5]
    lookup = SuffixMatch(text, text)
    text += [9, 8, 7, 1, 2, 3]
    lookup.skip(lookup.num_pending)
    assert lookup.draft(2) == (4, 5)
    text += [9, 8]
    for _ in range(2):
        lookup.advance()
    assert lookup.draft(4) == (7, 1, 2, 3)


def test_text_that_repeats_itself_goes_on_repeating() -> None:
    text = [5, 6, 7, 5, 6, 7]
    assert SuffixMatch(text, text).draft(7) == (5, 6, 7, 5, 6, 7, 5)


class TestPrediction:
    def follow(self, prediction: list[int], output: list[int]) -> SuffixMatch:
        text = [1, 2, 3]
        lookup = SuffixMatch(prediction, text, is_prediction=True)
        for token in output:
            text.append(token)
            lookup.advance()
        return lookup

    def test_begins_with_its_first_token(self) -> None:
        assert self.follow([7, 8, 9], []).draft(5) == (7, 8, 9)

    @pytest.mark.parametrize(
        ("changed", "case"),
        [
            ([99], "replaced"),
            ([], "removed"),
            ([4, 98, 99, 97], "inserted"),
            ([96, 95, 94, 93, 92], "longer"),
        ],
    )
    def test_continues_after_a_difference(self, changed: list[int], case: str) -> None:
        prediction = list(range(10, 60))
        output = [*range(10, 30), *changed, *range(31, 34)]
        lookup = self.follow(prediction, output)
        assert lookup.draft(3) == (34, 35, 36), case
        assert 20 <= lookup.num_followed <= 23

    def test_prefers_the_occurrence_after_the_place_where_it_left(self) -> None:
        prediction = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]
        lookup = self.follow(prediction, [1, 2, 3, 4, 77, 77, 1, 2])
        assert lookup.draft(2) == (3, 5)

    def test_ends_with_the_prediction(self) -> None:
        lookup = self.follow([7, 8], [7, 8])
        assert lookup.draft(3) == ()
        assert lookup.num_followed == 2


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

    class Counted(drafter.NGrams):
        def __init__(self, order: int, corpus: Sequence[int]) -> None:
            indexed.append(len(corpus))
            super().__init__(order, corpus)

    monkeypatch.setattr(drafter, "NGrams", Counted)
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
