"""Texts on their way through a model: those of all requests in turn, in batches, and a batch a few layers at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        """Texts that were taken and not computed: they are the next of their requests again."""
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
