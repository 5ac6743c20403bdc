"""Recurrent layers as data: what each keeps of a sequence, its tensors, and how ranks divide them.

Sizes, division, stages, checkpoints of states and sleep follow from this description; a layer adds its computation.
Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from cortex.neuron.delta_sizes import DeltaSizes


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state of a sequence."""

    shape: tuple[int, ...]
    is_float32: bool = False
    """Otherwise it has the dtype that the model computes in."""


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive rows of a tensor: `count` units of `size` rows. Ranks divide the units."""

    count: int
    size: int = 1

    @property
    def num_rows(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class RecurrentTensor:
    """A tensor of a layer."""

    name: str
    """In the layer's block, `"in_proj.weight"`."""
    role: Literal["input", "output", "small"]
    """A matrix that the hidden state is multiplied by, the matrix that returns to it, or neither."""
    bands: tuple[Band, ...] = ()
    """Its rows, or the columns of the output matrix, as ranks divide them; empty: every rank has all of it."""
    row_elements: int = 1
    """Elements in a row of a small tensor; without bands, all of its elements."""
    is_float32: bool = False
    """Whether a small tensor is kept in float32."""

    @property
    def num_rows(self) -> int:
        return sum(band.num_rows for band in self.bands) if self.bands else 1


@dataclass(frozen=True)
class RecurrentConfig(ABC):
    """A mixer that keeps a state of fixed size for every sequence."""

    hidden: int
    block: ClassVar[str]
    """Where a layer of the checkpoint has its tensors."""
    divided: ClassVar[Mapping[str, str]]
    """The fields that ranks divide → what they count."""
    shared: ClassVar[frozenset[str]] = frozenset()
    """Those of them whose units several ranks have where there are fewer units than ranks."""

    @property
    @abstractmethod
    def state(self) -> tuple[StatePart, ...]:
        """What the layer keeps of each sequence, in the order in which the layer takes the tensors."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[RecurrentTensor, ...]:
        """All of the layer's tensors."""

    def input_rows(self, prefix: str) -> dict[str, int]:
        """The input projections of the checkpoint (without `.weight`) → their number of rows, in order."""
        return self._matrices("input", prefix)

    def output_columns(self, prefix: str) -> dict[str, int]:
        """The output projection of the checkpoint (without `.weight`) → its number of columns."""
        return self._matrices("output", prefix)

    def _matrices(self, role: str, prefix: str) -> dict[str, int]:
        chosen = [tensor for tensor in self.tensors if tensor.role == role]
        return {f"{prefix}.{tensor.name.removesuffix('.weight')}": tensor.num_rows for tensor in chosen}


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(DeltaSizes, RecurrentConfig):
    conv_taps: int
    norm_eps: float

    block: ClassVar[str] = "linear_attn"
    divided: ClassVar[Mapping[str, str]] = {
        "key_heads": "key heads of the gated delta nets",
        "value_heads": "value heads of the gated delta nets",
    }

    @property
    def state(self) -> tuple[StatePart, ...]:
        """The latest inputs of the convolution, and the memory of every head."""
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return StatePart((self.conv_taps, self.channels)), StatePart(memory, is_float32=True)

    @property
    def tensors(self) -> tuple[RecurrentTensor, ...]:
        keys, values, heads = (
            Band(self.key_heads, self.key_dim),
            Band(self.value_heads, self.value_dim),
            Band(self.value_heads),
        )
        channels = (keys, keys, values)
        return (
            RecurrentTensor("in_proj_qkv.weight", "input", channels),
            RecurrentTensor("in_proj_z.weight", "input", (values,)),
            RecurrentTensor("in_proj_b.weight", "input", (heads,)),
            RecurrentTensor("in_proj_a.weight", "input", (heads,)),
            RecurrentTensor("conv1d.weight", "small", channels, self.conv_taps),
            RecurrentTensor("A_log", "small", (heads,), is_float32=True),
            RecurrentTensor("dt_bias", "small", (heads,), is_float32=True),
            RecurrentTensor("norm.weight", "small", row_elements=self.value_dim),
            RecurrentTensor("out_proj.weight", "output", (values,)),
        )


@dataclass(frozen=True, slots=True)
class ShortConvConfig(RecurrentConfig):
    """A gated convolution over a few tokens: c · conv(b · x), with b, c and x projected from the hidden state."""

    channels: int
    conv_taps: int

    block: ClassVar[str] = "conv"
    divided: ClassVar[Mapping[str, str]] = {"channels": "channels of the short convolutions"}

    @property
    def state(self) -> tuple[StatePart, ...]:
        """The latest inputs of the convolution."""
        return (StatePart((self.conv_taps, self.channels)),)

    @property
    def tensors(self) -> tuple[RecurrentTensor, ...]:
        channels = Band(self.channels)
        return (
            RecurrentTensor("in_proj.weight", "input", (channels, channels, channels)),
            RecurrentTensor("conv.weight", "small", (channels,), self.conv_taps),
            RecurrentTensor("out_proj.weight", "output", (channels,)),
        )


@dataclass(frozen=True, slots=True)
class MambaConfig(RecurrentConfig):
    """Mamba-2. Each group of heads shares what is written to and read from its states (B and C)."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_taps: int
    norm_eps: float
    norm_size: int
    """Consecutive values that one norm of the output spans; on a rank it may have fewer values than that."""
    conv_bias: bool = True

    block: ClassVar[str] = "mamba"
    divided: ClassVar[Mapping[str, str]] = {"heads": "Mamba heads", "groups": "groups of Mamba heads"}
    shared: ClassVar[frozenset[str]] = frozenset({"groups"})

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: x, B, C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> tuple[StatePart, ...]:
        """The latest inputs of the convolution, and the memory of every head."""
        memory = (self.heads, self.state_dim, self.head_dim)
        return StatePart((self.conv_taps, self.channels)), StatePart(memory, is_float32=True)

    @property
    def tensors(self) -> tuple[RecurrentTensor, ...]:
        inner, groups = Band(self.heads, self.head_dim), Band(self.groups, self.state_dim)
        heads, channels = Band(self.heads), (inner, groups, groups)
        bias = (RecurrentTensor("conv1d.bias", "small", channels, is_float32=True),) if self.conv_bias else ()
        return (
            RecurrentTensor("in_proj.weight", "input", (inner, *channels, heads)),
            RecurrentTensor("conv1d.weight", "small", channels, self.conv_taps),
            *bias,
            RecurrentTensor("A_log", "small", (heads,), is_float32=True),
            RecurrentTensor("D", "small", (heads,), is_float32=True),
            RecurrentTensor("dt_bias", "small", (heads,), is_float32=True),
            RecurrentTensor("norm.weight", "small", (inner,)),
            RecurrentTensor("out_proj.weight", "output", (inner,)),
        )
