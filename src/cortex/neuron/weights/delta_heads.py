"""The heads of gated delta nets, and where their rows are in files that group rows by key head. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.delta_sizes import DeltaSizes
from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import StoredTensor

Runs = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class DeltaHeads(DeltaSizes):
    """The heads of a gated delta net, as a file has them."""

    is_tiled: bool
    """Whether the file has the value heads in an order of its own."""

    @property
    def shared(self) -> int:
        """Value heads of each key head."""
        return self.value_heads // self.key_heads

    def value_runs(self, width: int, start: int = 0) -> Runs:
        """Where the value heads are in the file, `width` rows each, from row `start` on."""
        heads = range(self.value_heads)
        if self.is_tiled:
            heads_in_file = [head % self.shared * self.key_heads + head // self.shared for head in heads]
        else:
            heads_in_file = list(heads)
        return tuple(range(start + head * width, start + (head + 1) * width) for head in heads_in_file)

    def channel_runs(self) -> Runs:
        """Where the channels of the convolution are: queries, keys, values."""
        return (range(2 * self.key_size), *self.value_runs(self.value_dim, 2 * self.key_size))

    def by_key_head(self, sizes: tuple[int, ...], parts: range) -> Runs:
        """Where some parts are in rows that are grouped by key head, with `sizes` rows of each part in every group."""
        starts = [sum(sizes[:part]) for part in range(len(sizes))]
        return tuple(
            range(head * sum(sizes) + starts[part], head * sum(sizes) + starts[part] + sizes[part])
            for part in parts
            for head in range(self.key_heads)
        )


def joint_inputs(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    """The inputs by part of a tensor that has queries, keys, values and gates of each key head together."""
    values = heads.shared * heads.value_dim
    sizes = (heads.key_dim, heads.key_dim, values, values)
    check_rows(stored, 2 * heads.key_size + 2 * heads.value_size)
    return {
        "in_proj_qkv.weight": stored.with_rows(heads.by_key_head(sizes, range(3))),
        "in_proj_z.weight": stored.with_rows(heads.by_key_head(sizes, range(3, 4))),
    }


def joint_gates(stored: StoredTensor, heads: DeltaHeads) -> dict[str, StoredTensor]:
    """The two gates of a tensor that has both of each key head together."""
    sizes = (heads.shared, heads.shared)
    check_rows(stored, 2 * heads.value_heads)
    return {
        "in_proj_b.weight": stored.with_rows(heads.by_key_head(sizes, range(1))),
        "in_proj_a.weight": stored.with_rows(heads.by_key_head(sizes, range(1, 2))),
    }


def check_rows(stored: StoredTensor, count: int) -> None:
    """Raises Malformed if the tensor does not have this many rows."""
    if stored.num_rows != count or (len(stored.shape) == 1 and stored.is_blocked):
        raise misshapen(stored, f"{count} rows")


def misshapen(stored: StoredTensor, need: str) -> Malformed:
    return Malformed(
        f"{stored.file.path}: {stored.name} has the shape {stored.shape} in {stored.format}, the gated delta nets need "
        f"{need}; convert the model again"
    )
