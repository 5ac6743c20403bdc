from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.text.stops import StopScanner, held_suffix

from ...examples import MANY

LETTERS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        emitted, hit = scanner.push(piece)
        shown += emitted
        if hit is not None:
            assert scanner.push("more") == ("", hit)
            return shown, hit
    return shown + scanner.flush(), None


@MANY
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_result_does_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert scan(split, stops) == scan([text], stops) == scan(list(text), stops)


@MANY
@given(text=LETTERS, stops=STOPS)
def test_shows_the_text_before_the_stop_that_completes_first(text: str, stops: list[str]) -> None:
    shown, hit = scan([text], stops)
    ends = sorted((text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text)
    if not ends:
        assert (shown, hit) == (text, None)
    else:
        end, _, stop = ends[0]
        assert (shown, hit) == (text[: end - len(stop)], stop)


def test_holds_back_only_a_possible_beginning_of_a_stop() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.push("one </e") == ("one ", None)
    assert scanner.push("x <") == ("</ex ", None)
    assert scanner.push("/end> two") == ("", "</end>")


def test_without_stops_nothing_is_held_back() -> None:
    assert StopScanner([]).push("abc") == ("abc", None)
    assert StopScanner([""]).push("abc") == ("abc", None)


@MANY
@given(text=LETTERS, marker=st.text(alphabet="ab\n", max_size=6))
def test_held_suffix_is_the_longest_proper_beginning_of_the_marker(text: str, marker: str) -> None:
    sizes = [size for size in range(1, len(marker)) if text.endswith(marker[:size])]
    assert held_suffix(text, marker) == max(sizes, default=0)
