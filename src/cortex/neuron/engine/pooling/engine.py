"""An embedding or rerank model as an engine: batches of texts, in slices that leave time to other models.

The contract is that of the package `engine`. The texts of all requests take turns, in batches, and a batch goes through
a few layers at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import FaultyRequest, RequestError
from cortex.neuron.engine.loading.loading import LoadedModel
from cortex.neuron.engine.request import Counters, EngineRequest, EngineStats, LoadSpec, PooledTexts, StepOutput
from cortex.neuron.engine.uploads import upload
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.models.pooling.model import PooledModel


class QueuedText(NamedTuple):
    request_id: str
    number: int
    """Its place among the texts of its request."""
    num_tokens: int


class TextQueue:
    """Requests take turns, so that a request with thousands of texts does not delay one with a single text."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedText]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, lengths: Sequence[int]) -> None:
        texts = (QueuedText(request_id, index, num_tokens) for index, num_tokens in enumerate(lengths))
        self._waiting[request_id] = deque(texts)

    def remove(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def take(self, max_tokens: int, only: str | None = None) -> list[QueuedText]:
        """The next texts with at most `max_tokens` together, or a single longer one; `only`: of that request."""
        taken: list[QueuedText] = []
        free_tokens = max_tokens
        while (name := self._next(only)) is not None:
            texts = self._waiting.pop(name)
            if taken and texts[0].num_tokens > free_tokens:
                self._waiting = {name: texts, **self._waiting}  # the next batch begins with it
                return taken
            taken.append(texts.popleft())
            free_tokens -= taken[-1].num_tokens
            if texts:
                self._waiting[name] = texts  # behind all others
        return taken

    def put_back(self, texts: Iterable[QueuedText]) -> None:
        """Put texts that were taken but not computed back at the front of their requests."""
        for text in reversed(list(texts)):
            self._waiting.setdefault(text.request_id, deque()).appendleft(text)

    def _next(self, only: str | None) -> str | None:
        if only is None:
            return next(iter(self._waiting), None)
        return only if only in self._waiting else None


_PAGELESS = torch.empty(0, dtype=torch.int64)


class TextPass:
    """Belongs to the engine thread. `advance` until it is `done`, then `finish`, then `vectors`."""

    def __init__(self, model: PooledModel, texts: Sequence[NDArray[np.uint32]], first_segments: Sequence[int]) -> None:
        """`texts`: the token ids of each; `first_segments`: the tokens of its first segment, 0: all of them."""
        self._model = model
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.num_tokens = int(lengths.sum())
        self._batch = _batch_of(texts, lengths, model.parameters.device)
        self._segments = _segments_of(lengths, first_segments, self._batch)
        self._hidden: Tensor | None = None
        self._next_layer = 0
        self._vectors: Tensor | None = None

    @property
    def done(self) -> bool:
        return self._next_layer == len(self._model.layers)

    def advance(self, num_layers: int) -> int:
        """Launches the next layers; how many there were."""
        with torch.inference_mode():
            hidden = self._model.begin(self._batch, self._segments) if self._hidden is None else self._hidden
            layers = self._model.layers[self._next_layer : self._next_layer + num_layers]
            for layer in layers:
                hidden = layer(hidden, self._batch)
        self._hidden = hidden
        self._next_layer += len(layers)
        return len(layers)

    def finish(self) -> None:
        """Launches what follows the last layer."""
        assert self._hidden is not None, "no layer has run"
        with torch.inference_mode():
            self._vectors = self._model.finish(self._hidden, self._batch)
        self._hidden = None

    def vectors(self) -> NDArray[np.float32]:
        """[texts, width]; waits for the device."""
        assert self._vectors is not None, "the pass has not finished"
        found: NDArray[np.float32] = self._vectors.cpu().numpy()
        return found


def _batch_of(texts: Sequence[NDArray[np.uint32]], lengths: NDArray[np.int64], device: torch.device) -> Batch:
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    tokens = np.concatenate(texts).astype(np.int64)
    on_device = upload(device, tokens, positions.astype(np.int64), offsets.astype(np.int32))
    return Batch(
        tokens=on_device[0],
        positions=on_device[1],
        slots=_PAGELESS,
        rows=_PAGELESS,
        lengths=_PAGELESS,
        page_table=_PAGELESS,
        num_decodes=0,
        max_length=int(lengths.max()),
        prefills=tuple(
            PrefillRow(row, 0, int(count), int(offset))
            for row, (count, offset) in enumerate(zip(lengths, offsets, strict=False))
        ),
        prefill_offsets=on_device[2],
        has_pages=False,
    )


def _segments_of(lengths: NDArray[np.int64], first_segments: Sequence[int], batch: Batch) -> Tensor:
    """[tokens] int64: 0 in the first segment of a text, 1 in the second."""
    if not any(first_segments):
        return torch.zeros_like(batch.positions)
    ends = np.where(np.array(first_segments) > 0, first_segments, lengths)
    return (batch.positions >= upload(batch.positions.device, np.repeat(ends, lengths))[0]).long()


SLICE_S = 0.008
"""Approximate time of a step, which bounds how long other models of the device wait for tokens."""
_MIN_BATCH_TOKENS = 128
"""Fewer tokens do not occupy a CPU's cores."""
_SELF_TEST_TOKENS = 4


def batch_tokens(most: int, layer_token_s: float | None, slice_s: float) -> int:
    """The tokens of the next batch: on a slow device so few that one layer fits a slice. `layer_token_s`: None if no
    other model waits."""
    if layer_token_s is None:
        return most
    return min(most, max(_MIN_BATCH_TOKENS, int(slice_s / max(layer_token_s, 1e-12))))


@dataclass(slots=True, eq=False)
class _Request:
    """A request while it runs."""

    texts: PooledTexts
    offsets: NDArray[np.int64]
    vectors: NDArray[np.float32]
    """[texts, width]; rows are filled as they are computed."""
    num_left: int

    def tokens(self, index: int) -> NDArray[np.uint32]:
        ids = np.frombuffer(self.texts.ids, dtype=np.uint32)
        return ids[self.offsets[index] : self.offsets[index + 1]]

    def result(self) -> NDArray[np.float32]:
        """The vectors in the requested form, or the cosines."""
        vectors, num_queries = self.vectors[:, : self.texts.dimensions], self.texts.num_queries
        if not self.texts.normalize and not num_queries:
            return vectors
        lengths = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        normal: NDArray[np.float32] = (vectors / lengths).astype("<f4")
        return normal if not num_queries else np.einsum("ij,ij->i", *_pairs(normal, num_queries)).astype("<f4")

    def first_segment(self, index: int) -> int:
        return self.texts.first_segments[index] if self.texts.first_segments else 0


def _pairs(vectors: NDArray[np.float32], num_queries: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The queries, repeated to match the texts, and those texts."""
    queries, texts = np.split(vectors, [num_queries])
    return np.broadcast_to(queries, texts.shape), texts


@dataclass(frozen=True, slots=True)
class _Running:
    batch: TextPass
    texts: tuple[QueuedText, ...]


class PoolingLoop:
    """Has the interface of `StepLoop`. Belongs to the engine thread."""

    def __init__(
        self,
        model: PooledModel,
        batch_tokens: int,
        context_tokens: int,
        counters: Counters,
        shares_device: Callable[[], bool],
        slice_s: float,
    ) -> None:
        """`batch_tokens`: the most tokens of a batch, except that of a single text, which may have `context_tokens`.
        `shares_device`: whether other models compute on the device now. `slice_s`: about the time of a step, which has
        at least one layer."""
        self._model = model
        self._shares_device = shares_device
        self._batch_tokens = batch_tokens
        self._slice_s = slice_s
        self._context_tokens = context_tokens
        self.counters = counters
        self._requests: dict[str, _Request] = {}
        self._queue = TextQueue()
        self._running: _Running | None = None
        self._next: _Running | None = None
        """The next batch, uploaded while the device computes the end of the previous one."""
        self._outputs: list[StepOutput] = []
        self._layer_token_s: float | None = None
        """Time per layer and token, from the last slice."""
        self._failed: tuple[str, ...] = ()
        """The requests of the batch that raised last."""
        self._suspects: deque[str] = deque()
        """Requests to compute one at a time, in order."""

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Raises RequestError if the request can never be served."""
        texts, vocab = request.texts, self._model.config.vocab
        if texts is None:
            raise RequestError("this model generates no text; use a chat model")
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is already running")
        ids = np.frombuffer(texts.ids, dtype=np.uint32)
        if not texts.lengths or min(texts.lengths) < 1 or sum(texts.lengths) != len(ids):
            raise RequestError("a text has no tokens")
        if max(texts.lengths) > self._context_tokens:
            raise RequestError(f"a text has {max(texts.lengths)} tokens, at most {self._context_tokens} are supported")
        if ids.max() >= vocab:
            raise RequestError(f"a text has token ids outside the model's vocabulary of {vocab}")
        vectors = np.empty((len(texts.lengths), self._model.width), dtype="<f4")
        offsets = np.concatenate(([0], np.cumsum(texts.lengths, dtype=np.int64)))
        self._requests[request.id] = _Request(texts, offsets, vectors, len(texts.lengths))
        self._queue.add(request.id, texts.lengths)

    def cancel(self, request_id: str) -> None:
        """Ends a request at once. Unknown ids are ignored."""
        if request_id in self._requests:
            self._finish(StepOutput(request_id, finish="cancelled"))

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._running or self._next or self._outputs)

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Computes a slice of the running batch, or begins the next one. See `StepLoop.step` for what it raises."""
        self._failed = ()
        texts = self._running.texts if self._running is not None else ()
        try:
            if self._running is None:
                self._running, self._next = self._next, None
                texts = self._running.texts if self._running is not None else self._take()
            if self._running is None and texts:
                self._running = _Running(self._pass_of(texts), texts)
            if self._running is not None:
                self._advance(self._running)
        except Exception as error:
            self._retract(texts)
            if self._suspects:
                raise FaultyRequest(self._suspects[0]) from error
            self._failed = tuple(dict.fromkeys(text.request_id for text in texts if text.request_id in self._requests))
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self) -> tuple[QueuedText, ...]:
        while self._suspects and self._suspects[0] not in self._requests:
            self._suspects.popleft()
        only = self._suspects[0] if self._suspects else None
        layer_token_s = self._layer_token_s if self._shares_device() else None
        return tuple(self._queue.take(batch_tokens(self._batch_tokens, layer_token_s, self._slice_s), only))

    def _pass_of(self, texts: tuple[QueuedText, ...]) -> TextPass:
        owners = [self._requests[text.request_id] for text in texts]
        tokens = [owner.tokens(text.number) for owner, text in zip(owners, texts, strict=True)]
        segments = [owner.first_segment(text.number) for owner, text in zip(owners, texts, strict=True)]
        return TextPass(self._model, tokens, segments)

    def _advance(self, running: _Running) -> None:
        batch, began_s = running.batch, time.monotonic()
        num_layers = 1
        if self._layer_token_s is not None:
            num_layers = max(1, int(self._slice_s / max(self._layer_token_s * batch.num_tokens, 1e-9)))
        num_run = batch.advance(num_layers)
        vectors = None
        if batch.done:
            batch.finish()
            if not self._suspects:
                self._upload_next()
            vectors = batch.vectors()
        elif self._model.parameters.device.type == "cuda":
            torch.cuda.synchronize(self._model.parameters.device)  # other models must not queue behind this slice
        self._layer_token_s = (time.monotonic() - began_s) / (max(1, num_run) * batch.num_tokens)
        if vectors is not None:
            self._collect(running, vectors)

    def _upload_next(self) -> None:
        texts = self._take()
        try:
            self._next = _Running(self._pass_of(texts), texts) if texts else None
        except BaseException:
            self._queue.put_back(texts)
            raise

    def _collect(self, running: _Running, vectors: NDArray[np.float32]) -> None:
        self._running = None
        self.counters = self.counters.plus(Counters(steps=1, prompt_tokens=running.batch.num_tokens))
        if self._suspects:
            self._suspects.popleft()
        for text, vector in zip(running.texts, vectors, strict=True):
            owner = self._requests.get(text.request_id)
            if owner is None:
                continue  # cancelled meanwhile
            owner.vectors[text.number] = vector
            owner.num_left -= 1
            if not np.isfinite(vector).all():
                message = "the model computed a vector that is not finite for a text; the request was ended"
                self._finish(StepOutput(text.request_id, finish="error", error=message))
            elif not owner.num_left:
                self._finish(StepOutput(text.request_id, finish="stop", vectors=owner.result().tobytes()))

    def _retract(self, texts: tuple[QueuedText, ...]) -> None:
        """Requeue the texts of a failed batch, before those of the next one."""
        both = (*texts, *(self._next.texts if self._next is not None else ()))
        self._running = self._next = None
        self._queue.put_back(text for text in both if text.request_id in self._requests)

    def _finish(self, last: StepOutput) -> None:
        del self._requests[last.request_id]
        self._queue.remove(last.request_id)
        self._outputs.append(last)

    def prepare(self) -> bool:
        """Nothing to build."""
        return False

    def prepare_first(self) -> None:
        """Nothing to build."""

    def self_test(self) -> tuple[int, ...]:
        """The vector of a fixed short text, bit by bit; not counted."""
        token = min(1, self._model.config.vocab - 1)
        text = np.full(min(_SELF_TEST_TOKENS, self._context_tokens), token, dtype=np.uint32)
        batch = TextPass(self._model, [text], [0])
        batch.advance(len(self._model.layers))
        batch.finish()
        return tuple(batch.vectors().view(np.int32).ravel().tolist())

    def isolate(self) -> bool:
        """See `StepLoop.isolate`."""
        suspects, self._failed = self._failed, ()
        if not suspects:
            return False
        self.self_test()
        self._suspects.extend(suspects)
        return True

    # -- facts -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        waiting = self._queue.num_requests
        return EngineStats(running=len(self._requests) - waiting, waiting=waiting, **asdict(self.counters))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every text is accounted for."""
        batches = [batch for batch in (self._running, self._next) if batch is not None]
        running = {text.request_id for batch in batches for text in batch.texts}
        assert all(owner.num_left for owner in self._requests.values())
        assert self._queue.num_requests + len(running) >= len(self._requests)


BATCH_TOKENS: Final = {"cuda": 16_384, "cpu": 1_024}
"""Most tokens of a batch, unless a load says otherwise: enough for a device to be busy, and little to wait for."""


class PoolingEngine(Engine):
    """Belongs to the engine thread of its device's worker."""

    def __init__(self, loaded: LoadedModel, spec: LoadSpec, *, slice_s: float = SLICE_S) -> None:
        """`slice_s`: see `PoolingLoop`."""
        assert isinstance(loaded.body, PooledModel)
        self.pooled = loaded.body
        self._slice_s = slice_s
        super().__init__(loaded, spec)
        self.info = replace(self.info, vector_width=self.pooled.width)

    def _new_loop(self) -> PoolingLoop:
        batch_tokens = self._spec.prefill_chunk_tokens or BATCH_TOKENS[self._device.type]
        context_tokens = self._limits.context_tokens
        return PoolingLoop(
            *(self.pooled, batch_tokens, context_tokens, self._counters),
            shares_device=lambda: self.shares_device,
            slice_s=self._slice_s,
        )

    def close(self) -> None:
        del self.pooled
        super().close()
