"""Rotary position embedding: the frequencies of each scaling rule, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.configs import QueryGrowth, RopeConfig


def inverse_frequencies(rope: RopeConfig, num_positions: int = 0) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions [dims / 2], and the factor that scales cosines and sines.

    `num_positions`: the longest sequence, on which longrope depends.
    """
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims
    frequencies = rope.theta**-exponents
    if rope.scaling == "linear":
        return frequencies / rope.settings["factor"], 1.0
    if rope.scaling == "llama3":
        return _llama3(frequencies, rope.settings), 1.0
    if rope.scaling == "yarn":
        return _yarn(frequencies, rope)
    if rope.scaling == "longrope":
        return _longrope(frequencies, rope, num_positions)
    if rope.scaling == "proportional":
        return _proportional(frequencies, rope.settings), 1.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and interpolates between them."""
    factor = float(settings["factor"])
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor


def _yarn(frequencies: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Keeps high frequencies, stretches low ones, with a linear ramp between."""
    settings = rope.settings
    trained = settings.get("original_max_position_embeddings") or rope.trained_tokens
    factor = settings["factor"]

    def dimension_turning(turns: float) -> float:
        return rope.dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_turning(settings.get("beta_fast") or 32)
    high = dimension_turning(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    stretched = frequencies / factor * ramp + frequencies * (1 - ramp)
    return stretched, _yarn_attention_factor(settings, factor)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    given = settings.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    every_dim, all_dims = settings.get("mscale"), settings.get("mscale_all_dim")
    if every_dim and all_dims:
        return magnitude(every_dim) / magnitude(all_dims)
    return magnitude(1.0)


def _longrope(frequencies: Tensor, rope: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """Divides each frequency by a factor of its own: one set for contexts up to the original length, another for longer
    ones. The context that the model is loaded with decides, because keys in the cache cannot be rotated again."""
    settings = rope.settings
    original = settings["original_max_position_embeddings"]
    factors = settings["long_factor" if num_positions > original else "short_factor"]
    given, factor = settings.get("attention_factor"), settings.get("factor") or rope.trained_tokens / original
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / torch.tensor(factors, dtype=torch.float32), scale if given is None else float(given)


def _proportional(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Rotates the fastest of all pairs of dimensions. The rest do not turn."""
    count = int(settings.get("partial_rotary_factor", 1.0) * len(frequencies))
    return F.pad(frequencies[:count], (0, len(frequencies) - count)) / float(settings.get("factor") or 1.0)


def rope_table(rope: RopeConfig | None, num_positions: int, device: torch.device) -> Tensor:
    """[positions, dims] float32: cosines, then sines, without the pairs at the end that do not turn. Without a config,
    two dimensions are rotated by nothing."""
    if rope is None:
        return torch.tensor((1.0, 0.0), device=device).repeat(num_positions, 1)
    frequencies, scale = inverse_frequencies(rope, num_positions)
    if rope.scaling == "proportional":
        frequencies = frequencies[: rope.table_width // 2]
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * scale
    return table.to(device)


def query_growth(growth: QueryGrowth, num_positions: int, device: torch.device) -> Tensor:
    """[positions, 1, 1] float32: what queries are multiplied by."""
    spans = torch.arange(num_positions, device=device) // growth.trained_tokens
    return (1 + growth.beta * torch.log1p(spans.float()))[:, None, None]


class RopeTables:
    """The tables of a model with a row for each position. Layers that use positions in the same way share one."""

    def __init__(self, num_positions: int, device: torch.device, num_placed: int = 0) -> None:
        """`num_placed`: rows after those of positions, for tokens whose position has several axes."""
        self.num_positions = num_positions
        self._num_placed = num_placed
        self._device = device
        self._tables: dict[RopeConfig | None, Tensor] = {}
        self._growths: dict[QueryGrowth, Tensor] = {}

    def __getitem__(self, rope: RopeConfig | None) -> Tensor:
        """[positions, dims]: see `rope_table`"""
        if rope not in self._tables:
            table = rope_table(rope, self.num_positions, self._device)
            self._tables[rope] = F.pad(table, (0, 0, 0, self._num_placed)) if self._num_placed else table
        return self._tables[rope]

    def growth(self, growth: QueryGrowth) -> Tensor | None:
        """[positions, 1, 1]: see `query_growth`; None if no position is long enough."""
        if self.num_positions <= growth.trained_tokens:
            return None
        if growth not in self._growths:
            self._growths[growth] = query_growth(growth, self.num_positions, self._device)
        return self._growths[growth]

    @property
    def num_bytes(self) -> int:
        """The rows of positions."""
        tables = (*self._tables.values(), *self._growths.values())
        return sum(table[: self.num_positions].nbytes for table in tables)

    def place(self, axes: Tensor) -> None:
        """Fills the rows after those of positions: row `num_positions + i` turns each pair by its axis of `axes[:, i]`.

        axes: [3, tokens] int64"""
        first, end = self.num_positions, self.num_positions + axes.shape[1]
        for rope, table in self._tables.items():
            if rope is not None and rope.sections:
                pairs = table.shape[1] // 2
                by_pair = axes[torch.tensor([rope.axis(pair) for pair in range(pairs)])].T.to(table.device)
                table[first:end] = table.gather(0, by_pair.repeat(1, 2))

    def turns(self) -> list[list[float]]:
        """The row of position 1 of each table: frequencies and scale, from which all rows of positions follow."""
        return [table[min(1, self.num_positions - 1)].tolist() for table in self._tables.values()]

    def storages(self) -> list[torch.UntypedStorage]:
        return [table.untyped_storage() for table in (*self._tables.values(), *self._growths.values())]
