"""Drives a model on the CPU without an engine, and compares its logits with the reference library's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.models.decoder import Decoder

from .tiny_family import VOCAB

CPU = torch.device("cpu")
PROMPT_TOKENS = 75
MAX_ERROR = 1e-3


def spec(path: Path, **changes: Any) -> LoadSpec:
    options: dict[str, Any] = {"dtype": "float32", "context_tokens": 128, "max_num_seqs": 4}
    return LoadSpec(str(path), **(options | changes))


def load(path: Path, **changes: Any) -> Decoder:
    return load_model(spec(path, **changes), CPU, lambda *_: None, lambda: False).model


class Driver:
    """Feeds token rows to a model step by step, in chunks of any sizes, over pages in no particular order."""

    def __init__(self, model: Decoder, num_rows: int) -> None:
        self._model = model
        pages_each = 128 // PAGE_TOKENS
        order = torch.randperm(num_rows * pages_each, generator=torch.Generator().manual_seed(1)) + 1
        self._pages = order.view(num_rows, pages_each).to(torch.int32)

    def logits(self, rows: Sequence[Tensor], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """[tokens, vocab] of every row; `chunks[row]` are the sizes of its chunks, one a step."""
        parts: list[list[Tensor]] = [[] for _ in rows]
        done = [0] * len(rows)
        for step in range(max(map(len, chunks))):
            present = [(row, sizes[step]) for row, sizes in enumerate(chunks) if step < len(sizes)]
            present.sort(key=lambda item: item[1] > 1)
            hidden = self._model(self._batch(rows, done, present))
            for (row, count), part in zip(present, hidden.split([count for _, count in present]), strict=True):
                parts[row].append(self._model.logits(part.contiguous()))
                done[row] += count
        return [torch.cat(part) for part in parts]

    def _batch(self, rows: Sequence[Tensor], done: Sequence[int], present: list[tuple[int, int]]) -> Batch:
        positions = torch.cat([torch.arange(done[row], done[row] + count) for row, count in present])
        owners = torch.cat([torch.full((count,), row) for row, count in present])
        singles = sum(count == 1 for _, count in present)
        prefills, offset = [], singles
        for row, count in present[singles:]:
            prefills.append(PrefillRow(row, done[row], count, offset))
            offset += count
        return Batch(
            tokens=torch.cat([rows[row][done[row] : done[row] + count] for row, count in present]),
            positions=positions,
            slots=self._pages[owners, positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
            rows=torch.tensor([row for row, _ in present]),
            lengths=torch.tensor([done[row] + count for row, count in present], dtype=torch.int32),
            page_table=self._pages,
            num_decodes=singles,
            max_length=max(done[row] + count for row, count in present),
            prefills=tuple(prefills),
        )


def assert_parity(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max() < MAX_ERROR
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def some_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def continued(reference: Any, prompt: Sequence[int], max_tokens: int = 10) -> list[int]:
    """The greedy response of the reference library."""
    ids = reference.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
    )
    continuation: list[int] = ids[0, len(prompt) :].tolist()
    return continuation
