"""Which texts are computed next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.pooling.engine import QueuedText, TextQueue


def queue_of(**requests: list[int]) -> TextQueue:
    queue = TextQueue()
    for name, lengths in requests.items():
        queue.add(name, lengths)
    return queue


def test_requests_take_turns_within_the_tokens_of_a_batch() -> None:
    queue = queue_of(many=[10] * 5, one=[10], two=[10, 10])
    assert [(text.request_id, text.number) for text in queue.take(40)] == [
        ("many", 0),
        ("one", 0),
        ("two", 0),
        ("many", 1),
    ]
    assert [(text.request_id, text.number) for text in queue.take(20)] == [("two", 1), ("many", 2)]


def test_text_longer_than_a_batch_is_a_batch_of_its_own() -> None:
    queue = queue_of(short=[3], long=[100, 3])
    assert [text.num_tokens for text in queue.take(10)] == [3]
    assert [text.num_tokens for text in queue.take(10)] == [100]
    assert [text.num_tokens for text in queue.take(10)] == [3]
    assert not queue


def test_texts_of_a_failed_batch_come_first_again() -> None:
    queue = queue_of(a=[1, 1, 1], b=[1])
    taken = queue.take(3)
    queue.put_back(taken)
    assert sorted(queue.take(10)) == [
        QueuedText("a", 0, 1),
        QueuedText("a", 1, 1),
        *sorted([QueuedText("a", 2, 1), QueuedText("b", 0, 1)]),
    ]


def test_only_the_suspected_request_is_taken() -> None:
    queue = queue_of(a=[1, 1], b=[1])
    assert {text.request_id for text in queue.take(10, only="b")} == {"b"}
    assert queue.take(10, only="b") == []


@given(st.dictionaries(st.text("abc", min_size=1), st.lists(st.integers(1, 9), min_size=1)), st.integers(1, 20))
def test_every_text_is_taken_once_and_batches_fit(requests: dict[str, list[int]], batch: int) -> None:
    queue = TextQueue()
    for name, lengths in requests.items():
        queue.add(name, lengths)
    seen: list[QueuedText] = []
    while queue:
        taken = queue.take(batch)
        assert len(taken) == 1 or sum(text.num_tokens for text in taken) <= batch
        seen += taken
    expected = {(name, number) for name, lengths in requests.items() for number in range(len(lengths))}
    assert len(seen) == len(expected)
    assert {(text.request_id, text.number) for text in seen} == expected
