"""The digests of whole models, whose files are read in the background."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from cortex.neuron.node.library import FileStamps
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.models import Models
from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.weights.hub.local import model_files
from cortex.system.tasks import in_own_thread
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

_REST: Final = 3.0
"""Pauses between reads, as a multiple of the time of a read."""
_BUSY_S: Final = 0.5


class Contents:
    """Reads the files of models that were loaded, and of those whose samples are equal: to read every file that a scan
    finds could take a shared disk days. Belongs to the daemon's loop."""

    def __init__(
        self, digests: FileDigests, loader: ModelLoader, models: Models, on_changed: Callable[[str], None]
    ) -> None:
        self._digests = digests
        self._loader = loader
        self._models = models
        self._on_changed = on_changed
        self._failed: set[tuple[Path, FileStamps]] = set()
        self._is_closed = False

    async def read(self) -> None:
        """Reads what is not known, one model after another. Takes minutes."""
        samples = defaultdict[str | None, set[Path]](set)
        for each in self._loader.inspections.values():
            samples[each.metadata.digest].add(each.metadata.path)
        for model_id, inspection in list(self._loader.inspections.items()):
            path, is_shared = inspection.metadata.path, len(samples[inspection.metadata.digest]) > 1
            if inspection.content or not inspection.stamps or (path, inspection.stamps) in self._failed:
                continue
            if not (is_shared or self._models.was_loaded(model_id)):
                continue
            try:
                content = await in_own_thread(self._read, path)
            except OSError as error:
                self._failed.add((path, inspection.stamps))
                if not self._is_closed:
                    log.warning("%s: its files were not read for a digest: %s", model_id, os_error_in_words(error))
                continue
            if self._loader.inspections.get(model_id) is inspection:
                self._loader.inspections[model_id] = replace(inspection, content=content)
                self._on_changed(model_id)

    def close(self) -> None:
        self._is_closed = True

    def _read(self, path: Path) -> str:
        files = model_files(path)
        for file in files:
            self._digests.read(file, self._give_way, is_direct=True)
        return self._digests.of_files(files)

    def _give_way(self, took_s: float) -> None:
        time.sleep(took_s * _REST)
        while self._models.is_loading_any() and not self._is_closed:
            time.sleep(_BUSY_S)
        if self._is_closed:
            raise OSError("the node ends")
