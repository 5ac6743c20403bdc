"""Whole decode steps as graphs: one replay instead of hundreds of launches.

There is a graph for each of some batch sizes; a step takes the smallest that fits and pads. A graph reads from fixed
addresses: its input buffer, the page table, the rows' latest tokens. Steps that check draft tokens have graphs of their
own, in which each token is a row: a graph serves any division of its tokens among sequences. Graphs are captured one
at a time: the smallest when the model is loaded, the others while the engine is idle, or after enough steps that lacked
one. The ranks of a divided model capture the same graphs together, with the messages between them.

On a CPU a graph is a list of operations in C. It computes only existing rows, so one graph for the largest batch serves
all.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.uploads import host_memory_for
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.greedy import argmax
from cortex.neuron.kernels.native.operations import NotRecorded, Recording
from cortex.neuron.layers.parallel import ParallelGroup
from cortex.neuron.models.decoder import Decoder

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
DRAFT_SIZES = (2, 4, 8, 16, 32, 64)
"""Numbers of tokens of the steps that check drafts."""
MAX_NATIVE_ROWS = 16
"""On a CPU. In larger batches, operations take much longer than their launches."""
CAPTURE_AFTER_MISSES = 8
"""Steps without a graph before one is captured between steps; a capture takes about as long as two such steps."""

_FIRST_SLOTS = 6
"""See `StepGraphs`."""

Outputs = tuple[Tensor, ...]
"""The results of a step for each row: logits, argmax, whether all logits are finite, and the residual stream after the
last layer."""


class GraphSizes:
    """Which batch sizes have a graph, and which get one next. Pure."""

    def __init__(self, max_rows: int, sizes: Sequence[int] = SIZES, *, largest_second: bool = False) -> None:
        """`max_rows` and the `sizes` below it have graphs. `largest_second`: graphs share memory, which suffices for
        all others if the largest is captured before most of them."""
        self._largest_second = largest_second
        self._missing = sorted({size for size in sizes if size < max_rows} | {max_rows})
        self._captured: list[int] = []
        self._missed: Counter[int] = Counter()

    def serving(self, num_rows: int) -> int | None:
        """The smallest captured size that fits `num_rows`."""
        return _smallest(self._captured, num_rows)

    @property
    def largest(self) -> int:
        """The largest captured size; 0: none."""
        return self._captured[-1] if self._captured else 0

    @property
    def next_missing(self) -> int | None:
        """The size to capture while idle, the smallest first: small batches come first and most often."""
        if self._largest_second and self._missing and 0 < self.largest < self._missing[-1]:
            return self._missing[-1]
        return self.smallest_missing

    @property
    def smallest_missing(self) -> int | None:
        return self._missing[0] if self._missing else None

    def missed(self, num_rows: int) -> int | None:
        """Counts a step that no captured size fits. After enough of them, returns the size to capture."""
        size = _smallest(self._missing, num_rows)
        if size is None:
            return None
        self._missed[size] += 1
        return size if self._missed[size] >= CAPTURE_AFTER_MISSES else None

    def add(self, size: int) -> None:
        self._missing.remove(size)
        self._captured = sorted([*self._captured, size])

    def give_up(self) -> None:
        """Captures no more; existing graphs stay."""
        self._missing.clear()


def _smallest(sizes: list[int], num_rows: int) -> int | None:
    """`sizes` in ascending order."""
    return next((size for size in sizes if size >= num_rows), None)


def max_captured_rows(max_rows: int, row_elements: int, max_bytes: int) -> int:
    """The largest batch whose messages between ranks can be captured: up to `row_elements` elements of float32 for each
    row and rank, in messages of up to `max_bytes`. Pure."""
    return min(max_rows, max_bytes // (4 * row_elements))


class Graph(Protocol):
    def replay(self, rows: int) -> None:
        """Runs the step again for at least `rows` rows."""
        ...


class NotCaptured(Exception):
    """The step ran, but cannot be captured here."""


Capture = Callable[[Callable[[], Outputs]], tuple[Graph, Outputs]]
"""Captures a step; each replay computes it again, into the outputs returned with it. Raises NotCaptured, or what the
step raises."""


class CudaCapture:
    """Captures graphs that share one memory pool, because no two of them run at once."""

    def __init__(self, *, may_fail: bool = False) -> None:
        """`may_fail`: the step may have operations that cannot be captured: messages between ranks, about which NCCL
        decides, or those of another library's modules."""
        self._pool: Any = None
        self._rejections = (RuntimeError, GroupBroken) if may_fail else (torch.OutOfMemoryError,)

    def __call__(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # compiles kernels, and lets the libraries allocate their buffers
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile: NCCL has one that watches its calls.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = step()
        except self._rejections as error:
            raise NotCaptured("a step of the model cannot be captured as a CUDA graph") from error
        self._pool = self._pool or graph.pool()
        return _CudaGraph(graph), outputs


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph

    def replay(self, rows: int) -> None:  # noqa: ARG002
        self.graph.replay()


def native_capture(step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
    """Captures a step on a CPU: one that consists of operations in C, and few others."""
    recording = Recording()
    try:
        with recording:
            outputs = step()
    except NotRecorded as error:
        raise NotCaptured("a step of the model cannot be recorded") from error
    return recording, outputs


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Graph
    outputs: Outputs
    inputs: tuple[Tensor, ...]
    """Which each replay reads."""

    def replay_first(self, rows: int) -> None:
        """Replays a new CUDA graph: its first replay waits for the device, and would later delay running requests."""
        if self.inputs[0].is_cuda:
            self.graph.replay(rows)
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class CaptureCosts:
    """What captures have taken so far."""

    graphs: int = 0
    graph_bytes: int = 0
    graph_s: float = 0.0

    def __add__(self, other: CaptureCosts) -> CaptureCosts:
        return CaptureCosts(
            self.graphs + other.graphs, self.graph_bytes + other.graph_bytes, self.graph_s + other.graph_s
        )


class SizedGraphs(ABC):
    """Graphs of one computation, for several numbers of rows. Belongs to the engine thread."""

    def __init__(self, sizes: GraphSizes, capture: Capture, group: ParallelGroup, device: torch.device) -> None:
        """`group`: the ranks that compute it together."""
        self._sizes = sizes
        self._capture = capture
        self._group = group
        self._device = device
        self._captured: dict[int, Captured] = {}
        self.costs = CaptureCosts()

    def prepare(self) -> bool:
        """Captures the next graph; false if none is left."""
        size = self._sizes.next_missing
        return size is not None and self._add(size)

    def fits(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` can be replayed. May capture a graph for it."""
        if self.serves(num_rows):
            return True
        size = self._sizes.missed(num_rows)
        return size is not None and self._add(size)

    def serves(self, num_rows: int) -> bool:
        """Whether a graph for a step of `num_rows` is captured."""
        return self._sizes.serving(num_rows) is not None

    def padded(self, num_rows: int) -> int:
        """The size of the graph for `num_rows`; `num_rows` if there is none."""
        return self._sizes.serving(num_rows) or num_rows

    @property
    def smallest_missing(self) -> int | None:
        """The smallest size that `prepare` will capture; None if none is left."""
        return self._sizes.smallest_missing

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return tuple(self._captured)

    @property
    def max_rows(self) -> int:
        """The largest captured size; 0: none."""
        return self._sizes.largest

    @abstractmethod
    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        """The memory that a graph of `size` rows reads, with the content of padding rows."""

    @abstractmethod
    def _step(self, *inputs: Tensor) -> Outputs:
        """The captured computation."""

    def _serving(self, count: int) -> Captured:
        """The graph for `count` rows, for which `fits` returned true."""
        size = self._sizes.serving(count)
        assert size is not None
        return self._captured[size]

    def _room_bytes(self, size: int) -> int:  # noqa: ARG002
        """The working memory of a step of `size` rows, if large."""
        return 0

    def _add(self, size: int) -> bool:
        # A rank that runs out of memory within the step would leave the others waiting in the middle of it.
        needed = 0 if self._group.shard.is_whole else self._room_bytes(size)
        if needed and not self._all(self._usable_bytes() >= needed):
            log.info("steps of %d tokens are not captured: a device of the model has too little memory left", size)
            self._sizes.give_up()
            return False
        free_bytes, start = self._free_bytes(), time.perf_counter()
        inputs = self._inputs(size)
        captured = None
        try:
            captured = Captured(*self._capture(lambda: self._step(*inputs)), inputs)
        except NotCaptured as error:
            log.info(
                "steps of %d rows run one operation at a time: this model cannot be captured as a CUDA graph", size
            )
            log.debug("not captured: %s", error.__cause__)
        except torch.OutOfMemoryError:
            if not self._group.shard.is_whole:
                raise  # the other ranks wait in the middle of the step
        if not self._all(captured is not None):
            self._sizes.give_up()  # steps also run without graphs, and need the memory more
            return False
        assert captured is not None
        captured.replay_first(size)
        self._captured[size] = captured
        self._sizes.add(size)
        taken_bytes, seconds = max(0, free_bytes - self._free_bytes()), time.perf_counter() - start
        self.costs += CaptureCosts(1, taken_bytes, seconds)
        log.debug("captured a step of %d: %.0f ms, %d MiB", size, seconds * 1e3, taken_bytes >> 20)
        return True

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0

    def _usable_bytes(self) -> float:
        """Free memory, including torch's unused cache."""
        if self._device.type != "cuda":
            return math.inf
        held_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return self._free_bytes() + held_bytes

    def _all(self, succeeded: bool) -> bool:
        """Whether all ranks succeeded, because ranks with and without a graph would send messages of different
        sizes."""
        if self._group.shard.is_whole:
            return succeeded
        flag = torch.full((1,), float(succeeded), device=self._device)
        return self._group.all_reduce(flag).item() == self._group.shard.size


class StepGraphs(SizedGraphs):
    """The graphs of one model's steps. A graph's input is [6 + KV groups, size] int64: rows, positions, tokens,
    positions of the rotation, lengths (int32, in the first half of their memory), nothing (what follows begins at a
    multiple of 16 bytes, as the kernels expect), and slots in each group."""

    def __init__(
        self,
        model: Decoder,
        page_tables: Sequence[Tensor],
        last_tokens: Tensor,
        sizes: GraphSizes,
        context_tokens: int,
        capture: Capture,
        *,
        is_batch_invariant: bool = False,
        checks_drafts: bool = False,
    ) -> None:
        """`page_tables`: of each KV group; their last row is the padding row. `is_batch_invariant`: see `Batch`.
        `checks_drafts`: rows may be tokens of the same sequence, and the host gives their tokens."""
        super().__init__(sizes, capture, model.parameters.group, last_tokens.device)
        self._checks_drafts = checks_drafts
        self._model = model
        self._page_tables = tuple(page_tables)
        self._last_tokens = last_tokens
        self._padding_row = len(last_tokens) - 1
        self._padding: dict[int, NDArray[np.int64]] = {}
        """By size: the input of a graph without rows."""
        self._is_batch_invariant = is_batch_invariant
        self._context_tokens = context_tokens

    def replay(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        tokens: NDArray[np.int64] | Tensor | None = None,
        rope: NDArray[np.int64] | None = None,
    ) -> Outputs:
        """Runs a step for which `fits` returned true. The outputs are valid until the next replay, in stream order.

        slots: [KV groups, rows]. tokens: of each row, if the graphs check drafts, from the host or on the device; None:
        the rows' latest tokens.
        rope: the positions of the rotation; None: the rows' positions."""
        count = len(rows)
        captured = self._serving(count)
        (memory,) = captured.inputs
        host = host_memory_for(memory)
        inputs = host.numpy()
        inputs[:] = self._padding[memory.shape[1]]
        inputs[0, :count], inputs[1, :count], inputs[_FIRST_SLOTS:, :count] = rows, positions, slots
        inputs[3, :count] = positions if rope is None else rope
        np.add(positions, 1, out=inputs[4].view(np.int32)[:count], casting="same_kind")
        if isinstance(tokens, np.ndarray):
            inputs[2, :count] = tokens
        memory.copy_(host, non_blocking=True)
        if isinstance(tokens, Tensor):
            memory[2, :count] = tokens
        captured.graph.replay(count)
        return tuple(output[:count] for output in captured.outputs)

    def all_logits(self, num_rows: int) -> Tensor:
        """Where the graph for `num_rows` rows writes the logits: [its size, vocab]"""
        return self._serving(num_rows).outputs[0]

    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        inputs = np.zeros((_FIRST_SLOTS + len(self._page_tables), size), dtype=np.int64)
        inputs[0] = self._padding_row
        inputs[4].view(np.int32)[:] = 1
        inputs[_FIRST_SLOTS:] = PADDING_PAGE
        self._padding[size] = inputs
        return (torch.tensor(inputs, device=self._device),)

    def _step(self, *inputs: Tensor) -> Outputs:
        rows, positions, given, rope, lengths, _, slots, *others = inputs[0].unbind()
        first, *tables = self._page_tables
        count = len(rows)
        offsets = torch.arange(count + 1, dtype=torch.int32, device=rows.device) if self._is_batch_invariant else None
        batch = Batch(
            tokens=given if self._checks_drafts else self._last_tokens.index_select(0, rows),
            positions=positions,
            slots=slots,
            rows=rows,
            lengths=lengths.view(torch.int32)[:count],
            page_table=first,
            num_decodes=0 if self._is_batch_invariant else count,
            max_length=self._context_tokens,
            prefill_offsets=offsets,
            prefill_tiles=None if offsets is None else F.pad(offsets[:-1, None], (0, 1)),
            batch_invariant=self._is_batch_invariant,
            shares_rows=self._checks_drafts,
            rope=rope if self._model.architecture.pictures.has_axes else None,
        ).with_groups(others, tables)
        hidden = self._model(batch)
        logits = self._model.logits(hidden)
        tokens, healthy = argmax(logits)
        self._last_tokens.index_copy_(0, rows, tokens)
        return logits, tokens, healthy, hidden
