"""Requests of an embedding model: batches of several requests, slices, cancellation, faults and sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex.neuron.engine.errors import FaultyRequest, RequestError
from cortex.neuron.engine.pooling.engine import SLICE_S, PoolingEngine, batch_tokens
from cortex.neuron.engine.request import EngineRequest, PooledTexts

from .pooled_models import BERT, LENGTHS, SIZES, VOCAB, load, load_sliced, request_of, run, texts_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    BERT.build(path)
    return path


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[PoolingEngine]:
    engine = load(checkpoint, prefill_chunk_tokens=64)
    yield engine
    engine.check_integrity()
    engine.close()


def test_requests_share_batches_and_keep_the_order_of_their_texts(engine: PoolingEngine) -> None:
    requests = {f"r{number}": texts_of(LENGTHS, seed=number) for number in range(4)}
    alone = {name: run(engine, request_of(name, texts))[name] for name, texts in requests.items()}
    steps_before = engine.stats().steps
    together = run(engine, *(request_of(name, texts) for name, texts in requests.items()))
    for name, vectors in together.items():
        assert np.allclose(vectors, alone[name], atol=1e-5)
    num_tokens = 4 * sum(LENGTHS)
    assert engine.stats().steps - steps_before < 4 * len(LENGTHS), "texts are computed in batches"
    assert engine.stats().prompt_tokens == 2 * num_tokens


@pytest.mark.parametrize(
    ("layer_token_s", "expected"), [(None, 16_384), (1e-9, 16_384), (1e-6, 8_000), (1e-2, 128), (0.0, 16_384)]
)
def test_batch_of_a_slow_device_is_small(layer_token_s: float | None, expected: int) -> None:
    assert batch_tokens(16_384, layer_token_s, SLICE_S) == expected


def test_batches_are_small_only_while_other_models_compute(checkpoint: Path) -> None:
    engine = load_sliced(checkpoint, 1e-9, prefill_chunk_tokens=256)
    for shares_device, expected in ((False, 1), (True, 2)):
        engine.shares_device = shares_device
        run(engine, request_of("warm", texts_of([8])))
        before = engine.stats().steps
        run(engine, request_of("r", texts_of([100, 100])))
        assert engine.stats().steps - before == expected
    engine.close()


def test_batch_runs_in_slices_of_layers(checkpoint: Path) -> None:
    engine = load_sliced(checkpoint, 0.0)
    engine.submit(request_of("r", texts_of([8])))
    outputs = [engine.step() for _ in range(SIZES["num_hidden_layers"])]
    assert [len(each) for each in outputs] == [0] * (SIZES["num_hidden_layers"] - 1) + [1]
    engine.close()


def test_vectors_are_cut_and_normalised_again(engine: PoolingEngine) -> None:
    texts = texts_of(LENGTHS)
    whole = run(engine, request_of("whole", texts))["whole"]
    plain = request_of("cut", texts).texts
    assert plain is not None
    cut = PooledTexts(plain.ids, plain.lengths, dimensions=8, normalize=True)
    engine.submit(EngineRequest("cut", (), 0, texts=cut))
    [output] = [output for _ in range(99) for output in engine.step()]
    vectors = np.frombuffer(output.vectors, dtype="<f4").reshape(-1, 8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=-1, keepdims=True)
    assert np.allclose(vectors, expected, atol=1e-6)


def test_cancelled_request_ends_at_once_and_the_others_continue(engine: PoolingEngine) -> None:
    for name in ("one", "two"):
        engine.submit(request_of(name, texts_of(LENGTHS)))
    engine.step()
    engine.cancel("one")
    finishes = {output.request_id: output.finish for _ in range(200) for output in engine.step()}
    assert finishes == {"one": "cancelled", "two": "stop"}
    assert not engine.has_work


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (None, "generates no text"),
        (PooledTexts(b"", ()), "no tokens"),
        (PooledTexts(np.array([1], np.uint32).tobytes(), (1, 0)), "no tokens"),
        (PooledTexts(np.array([1, 2], np.uint32).tobytes(), (1,)), "no tokens"),
        (PooledTexts(np.array([VOCAB], np.uint32).tobytes(), (1,)), "vocabulary"),
        (PooledTexts(np.ones(500, np.uint32).tobytes(), (500,)), "at most 128"),
    ],
)
def test_request_that_can_never_be_served_is_rejected(
    engine: PoolingEngine, texts: PooledTexts | None, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        engine.submit(EngineRequest("r", (), 0, texts=texts))
    assert not engine.has_work


def test_request_that_makes_a_batch_fail_is_found_and_the_others_are_served(
    engine: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = engine.pooled.begin

    def fails_on_poison(batch: Any, segments: Any) -> Any:
        if (batch.tokens == 77).any():
            raise ValueError("poison")
        return begin(batch, segments)

    monkeypatch.setattr(engine.pooled, "begin", fails_on_poison)
    good = [np.full(5, 4, np.uint32)]
    engine.submit(request_of("good", good))
    engine.submit(request_of("bad", [np.full(5, 77, np.uint32)]))
    engine.submit(request_of("fine", good))
    with pytest.raises(ValueError, match="poison"):
        engine.step()
    assert engine.isolate()
    ended: dict[str, str | None] = {}
    for _ in range(200):
        try:
            ended |= {output.request_id: output.finish for output in engine.step()}
        except FaultyRequest as error:
            engine.cancel(error.request_id)
    assert ended == {"good": "stop", "bad": "cancelled", "fine": "stop"}


def test_model_wakes_as_the_same_model(engine: PoolingEngine) -> None:
    texts = texts_of(LENGTHS)
    before = run(engine, request_of("before", texts))["before"]
    assert engine.sleep() > 0
    with pytest.raises(RequestError):
        engine.submit(request_of("asleep", texts))
    engine.wake(lambda *_: None)
    assert np.array_equal(run(engine, request_of("after", texts))["after"], before)
