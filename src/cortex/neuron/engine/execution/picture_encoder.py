"""Picture vectors: computed by the tower when a step needs them, together with those of waiting requests, and cached
for later requests with the same pictures."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cortex.neuron.engine.scheduling.picture_positions import PictureSpan
from cortex.neuron.models.towers.config import num_cached_vectors
from cortex.neuron.models.towers.tower import PixelGrid, Tower
from cortex.neuron.pictures.picture import Picture


class PictureEncoder:
    """Belongs to the engine thread. Vectors beyond the limit are dropped, the least recently used first, and computed
    again when they are needed."""

    def __init__(
        self,
        tower: Tower,
        pass_patches: int,
        device: torch.device,
        *,
        is_batch_invariant: bool = False,
        max_vectors: int | None = None,
    ) -> None:
        """`device`: where steps need the vectors. `is_batch_invariant`: pictures are computed alone, so that vectors do
        not depend on others. `max_vectors`: the size of the cache; None: as many as the load reserved memory for."""
        self._tower = tower
        self._pass_patches = 0 if is_batch_invariant else pass_patches
        self._max_vectors = num_cached_vectors(pass_patches) if max_vectors is None else max_vectors
        self._device = device
        self._pictures: dict[bytes, Picture] = {}
        self._users: Counter[bytes] = Counter()
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0
        """Number of pictures that the tower has computed."""

    def add(self, pictures: Iterable[Picture]) -> None:
        """Pictures of a request that may need their vectors from now on."""
        for picture in pictures:
            self._pictures[picture.key] = picture
            self._users[picture.key] += 1

    def remove(self, pictures: Iterable[Picture]) -> None:
        """The request has ended: its pixels are no longer needed. Vectors are kept."""
        for picture in pictures:
            self._users[picture.key] -= 1
            if not self._users[picture.key]:
                del self._users[picture.key], self._pictures[picture.key]

    def vectors(self, spans: Sequence[PictureSpan], counts: Sequence[tuple[int, int]]) -> Tensor:
        """[vectors, parts, width]: those of the pictures of a step. `counts`: the first vector of each span, and how
        many."""
        needed = {span.key for span in spans}
        self._encode(needed)
        parts = []
        for span, (first, count) in zip(spans, counts, strict=True):
            self._vectors.move_to_end(span.key)
            parts.append(self._vectors[span.key][first : first + count])
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._trim()
        return joined.to(self._device, non_blocking=True)

    def _encode(self, needed: set[bytes]) -> None:
        """Computes those of `needed` that are not cached. Other pictures of waiting requests fill the last pass."""
        missing = [self._pictures[key] for key in self._pictures if key in needed and key not in self._vectors]
        if not missing:
            return
        num_kept = sum(picture.grid.num_features for picture in missing)
        for key, picture in self._pictures.items():
            num_kept += picture.grid.num_features
            if self._pass_patches and key not in needed and key not in self._vectors and num_kept <= self._max_vectors:
                missing.append(picture)
        for batch in self._passes(missing, needed):
            # Equal sizes side by side: their attention is one operation.
            batch.sort(key=lambda picture: (picture.grid.rows, picture.grid.columns))
            vectors = self._tower([PixelGrid(picture.grid, picture.pixels) for picture in batch])
            self.num_encoded += len(batch)
            sizes = [picture.grid.num_features for picture in batch]
            for picture, own in zip(batch, vectors.split(sizes), strict=True):
                self._vectors[picture.key] = own

    def _passes(self, pictures: Sequence[Picture], needed: set[bytes]) -> Iterable[list[Picture]]:
        """Batches of pictures, each with at least one that a step needs."""
        batch: list[Picture] = []
        num_patches = 0
        for picture in pictures:
            size = self._tower.num_patches(PixelGrid(picture.grid, b""))
            if batch and num_patches + size > self._pass_patches:
                yield batch
                batch, num_patches = [], 0
            if not batch and picture.key not in needed:
                return
            batch.append(picture)
            num_patches += size
        if batch:
            yield batch

    def _trim(self) -> None:
        total = sum(len(vectors) for vectors in self._vectors.values())
        while total > self._max_vectors and len(self._vectors) > 1:
            _, dropped = self._vectors.popitem(last=False)
            total -= len(dropped)
