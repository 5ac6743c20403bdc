"""The pages of every row, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.scheduling.step_plan import NewPages
from cortex.neuron.engine.uploads import fill, upload

Addition = tuple[int, int, int]
"""(row, first column, columns)"""


class PageTables:
    """A table for each KV group, [rows, pages of the longest sequence] int32. Belongs to the engine thread."""

    def __init__(self, num_groups: int, num_rows: int, max_pages: int, page_tokens: int, device: torch.device) -> None:
        self._page_tokens = page_tokens
        self._device = device
        self.on_host = [np.full((num_rows, max_pages), PADDING_PAGE, dtype=np.int32) for _ in range(num_groups)]
        self.on_device = [torch.from_numpy(table).to(device) for table in self.on_host]  # on a CPU: not copied
        self.ends = np.zeros(num_rows, dtype=np.int64)
        """The positions that the pages of each row reach in the first group."""

    def extend(self, new_pages: Sequence[NewPages]) -> None:
        """Applies a step's additions to the tables without waiting for the device."""
        for row, group, first, pages in new_pages:
            self.on_host[group][row, first : first + len(pages)] = pages
            if group == 0:
                self.ends[row] = (first + len(pages)) * self._page_tokens
        if self._device.type == "cpu" or not new_pages:
            return
        for group, (table, host) in enumerate(zip(self.on_device, self.on_host, strict=True)):
            added = joined((row, first, len(pages)) for row, owner, first, pages in new_pages if owner == group)
            flat, width = host.reshape(-1), host.shape[1]
            if len(added) == 1:
                ((row, first, count),) = added
                here = slice(row * width + first, row * width + first + count)
                fill(table.view(-1)[here], flat[here])
            elif added:
                places = flat_places(added, width)
                index, page_ids = upload(self._device, places, flat[places])
                table.view(-1).index_copy_(0, index, page_ids)


def joined(added: Iterable[Addition]) -> list[Addition]:
    """The same additions, each with those that follow it in its row: a prompt after a cached prefix has two. Pure."""
    found: list[Addition] = []
    for row, first, count in added:
        if found and (found[-1][0], sum(found[-1][1:])) == (row, first):
            found[-1] = (row, found[-1][1], found[-1][2] + count)
        else:
            found.append((row, first, count))
    return found


def flat_places(added: Sequence[Addition], width: int) -> NDArray[np.int64]:
    """The memory offsets of additions to a table of `width` columns. Pure."""
    return np.concatenate([np.arange(row * width + first, row * width + first + count) for row, first, count in added])
