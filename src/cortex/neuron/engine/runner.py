"""Runs planned steps on the device: page tables, input tensors, the forward pass, the draw.

The rows' page tables and latest tokens live on the device for as long as the row is held, so a decode step sends
only positions. `launch` does not wait for the device; `Launched.read` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.engine.pages import PADDING_PAGE
from cortex.neuron.engine.request import TokenLogprobs
from cortex.neuron.engine.sampler import Draw, Drawn, Sampler
from cortex.neuron.engine.scheduler import RowPlan, StepPlan
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Result:
    """What the host learns of a step, one entry per drawing row in plan order."""

    tokens: list[int]
    healthy: list[bool]
    logprobs: list[TokenLogprobs] | None


class Launched:
    """A step the device is working on."""

    def __init__(self, drawn: Drawn | None) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: list[Tensor | None] = []
        if drawn is None:
            return
        parts = (drawn.tokens, drawn.healthy, drawn.logprobs, drawn.top_ids, drawn.top_logprobs)
        self._host = [part if part is None else part.to("cpu", non_blocking=True) for part in parts]
        if drawn.tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Result:
        """Waits for the step, and gives its tokens."""
        if self._event is not None:
            self._event.synchronize()
        if not self._host:
            return Result([], [], None)
        tokens, healthy, logprobs, top_ids, top_logprobs = (
            None if part is None else part.tolist() for part in self._host
        )
        if logprobs is None:
            return Result(tokens, healthy, None)
        if top_ids is None:
            return Result(tokens, healthy, [TokenLogprobs(logprob) for logprob in logprobs])
        rows = zip(logprobs, top_ids, top_logprobs, strict=True)
        return Result(tokens, healthy, [TokenLogprobs(one, tuple(ids), tuple(many)) for one, ids, many in rows])


class Runner:
    """Owns the rows' state on the device. Belongs to the engine thread."""

    def __init__(self, model: Decoder, page_tokens: int, max_rows: int, context_tokens: int) -> None:
        self.model = model
        self.device = model.parameters.device
        self.page_tokens = page_tokens
        self.padding_row = max_rows
        max_pages = -(-context_tokens // page_tokens)
        self._pages = np.full((max_rows + 1, max_pages), PADDING_PAGE, dtype=np.int32)
        self._page_table = torch.from_numpy(self._pages).to(self.device)  # on the CPU: the same memory
        self._last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)
        self.sampler = Sampler(max_rows + 1, model.config.vocab, context_tokens, self.device)

    def launch(self, plan: StepPlan, draws: Sequence[Draw], mask: Tensor | None = None) -> Launched:
        """Starts a step. `draws` are the plan's drawing rows in order; `mask` forbids tokens to them."""
        for row, request in plan.new_rows:
            self.sampler.assign(row, request)
        self._extend_tables(plan)
        batch, last = self._batch(plan)
        with torch.inference_mode():
            hidden = self.model(batch)
            if not draws:
                return Launched(None)
            rows = self._upload(np.fromiter((draw.row for draw in draws), np.int64, len(draws)))
            index = self._upload(last)
            logits = self.model.logits(hidden.index_select(0, index))
            drawn = self.sampler.draw(logits, rows, batch.positions[index], draws, mask)
            self._last_tokens.index_copy_(0, rows, drawn.tokens)
            return Launched(drawn)

    def _extend_tables(self, plan: StepPlan) -> None:
        if not plan.new_pages:
            return
        for row, first, pages in plan.new_pages:
            self._pages[row, first : first + len(pages)] = pages
        if self.device.type == "cpu":
            return
        rows = np.concatenate([np.full(len(pages), row) for row, _, pages in plan.new_pages])
        columns = np.concatenate([np.arange(first, first + len(pages)) for _, first, pages in plan.new_pages])
        pages = np.concatenate([pages for _, _, pages in plan.new_pages]).astype(np.int32)
        self._page_table.index_put_((self._upload(rows), self._upload(columns)), self._upload(pages))

    def _batch(self, plan: StepPlan) -> tuple[Batch, np.ndarray]:
        """The step's tensors, and for each drawing row the index of its last token."""
        decodes, prefills = plan.rows[: plan.num_decodes], plan.rows[plan.num_decodes :]
        row_ids = np.fromiter((row.row for row in plan.rows), np.int64, len(plan.rows))
        counts = np.fromiter((row.count for row in plan.rows), np.int64, len(plan.rows))
        starts = np.fromiter((row.start for row in plan.rows), np.int64, len(plan.rows))
        offsets = np.concatenate(([0], counts.cumsum()))
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
        pages = self._pages[np.repeat(row_ids, counts), positions // self.page_tokens]
        slots = pages.astype(np.int64) * self.page_tokens + positions % self.page_tokens
        for index, row in enumerate(plan.rows):
            if not row.writes:
                slots[offsets[index] : offsets[index + 1]] = PADDING_PAGE
        tokens = np.zeros(offsets[-1], dtype=np.int64)
        for index, prefill in enumerate(prefills, len(decodes)):
            tokens[offsets[index] : offsets[index + 1]] = prefill.tokens
        rows = self._upload(row_ids)
        token_ids = self._upload(tokens)
        if decodes:
            token_ids[: len(decodes)] = self._last_tokens[rows[: len(decodes)]]
        lengths = starts + counts
        batch = Batch(
            tokens=token_ids,
            positions=self._upload(positions),
            slots=self._upload(slots),
            rows=rows,
            lengths=self._upload(lengths.astype(np.int32)),
            page_table=self._page_table,
            num_decodes=len(decodes),
            max_length=int(lengths.max()),
            prefills=tuple(_prefill_rows(prefills, offsets[len(decodes) :])),
            prefill_offsets=self._upload((offsets[len(decodes) :] - len(decodes)).astype(np.int32)),
        )
        last = offsets[1:][np.fromiter((row.draws for row in plan.rows), bool, len(plan.rows))] - 1
        return batch, last

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _prefill_rows(rows: Sequence[RowPlan], offsets: np.ndarray) -> list[PrefillRow]:
    return [PrefillRow(row.row, row.start, row.count, int(offset)) for row, offset in zip(rows, offsets, strict=False)]
