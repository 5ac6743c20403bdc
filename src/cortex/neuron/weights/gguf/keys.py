"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from cortex.neuron.families.gguf import FLOAT32_DIGITS
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.metadata import GGUFFile


class Keys:
    """Typed access to the metadata of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._wrong(name, value)
        return float(f"{value:.{FLOAT32_DIGITS}g}")

    def count(self, name: str, default: int | None = None, limit: int = (1 << 31) - 1) -> int:
        value = self._get(name, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # some files list what all layers have
            value = value[0]
        if isinstance(value, list):
            raise Unsupported(
                f"{self._file.path}: {self._architecture}.{name} differs from layer to layer, which is not supported"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise self._wrong(name, value)
        return value

    def layer_counts(self, name: str, num_layers: int, default: int | None = None) -> list[int]:
        """A count for each layer, also zero: a list in the file, or one number for all."""
        value = self._get(name, default)
        counts = value if isinstance(value, list) else [value] * num_layers
        if len(counts) < num_layers or not all(type(count) is int and 0 <= count < 1 << 31 for count in counts):
            raise self._wrong(name, value)
        return counts[:num_layers]

    def count_of_layers(self, name: str, num_layers: int, default: int) -> int:
        """The count of those layers that have one, which is the same for all of them; `default` if no layer has."""
        counts = set(self.layer_counts(name, num_layers, default)) - {0}
        if len(counts) > 1:
            raise Unsupported(
                f"{self._file.path}: {self._architecture}.{name} differs from layer to layer, which is not supported"
            )
        return counts.pop() if counts else default

    def counts(self, name: str, num_layers: int, default: int | None = None) -> list[int]:
        """One for each layer, of files that list them or have one for all."""
        value = self._get(name, default)
        if not isinstance(value, list):
            return [self.count(name, default)] * num_layers
        is_count = [isinstance(each, int) and not isinstance(each, bool) and 0 < each < 1 << 31 for each in value]
        if len(value) < num_layers or not all(is_count):
            raise self._wrong(name, value)
        return value[:num_layers]

    def num_rows(self, tensor: str) -> int:
        """How many rows a tensor has; 0 if the file does not have it."""
        return self._file.tensors[tensor].shape[0] if tensor in self._file.tensors else 0

    def has(self, name: str) -> bool:
        """Whether the file has the key with a value other than zero."""
        return bool(self._file.metadata.get(f"{self._architecture}.{name}", 0) != 0)

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._file.metadata.get(f"{self._architecture}.{name}", default))

    def windows(self, num_layers: int, period: int, *, is_first: bool = False) -> dict[str, Any]:
        """The window and the type of every layer; without a window all have full attention.

        `period`: every which layer has none, in files that do not name it: the last of each period, or the first.
        """
        if not self.has("attention.sliding_window"):
            return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
        pattern = self._file.metadata.get(f"{self._architecture}.attention.sliding_window_pattern", period)
        if not isinstance(pattern, list):
            if not isinstance(pattern, int) or pattern < 1:
                raise self._wrong("attention.sliding_window_pattern", pattern)
            pattern = [bool((layer + (not is_first)) % pattern) for layer in range(num_layers)]
        if len(pattern) < num_layers:
            raise self._wrong("attention.sliding_window_pattern", pattern)
        types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern[:num_layers]]
        return {"sliding_window": self.count("attention.sliding_window"), "layer_types": types}

    def unsupported(self, name: str, reason: str) -> Unsupported:
        value = self._file.metadata.get(f"{self._architecture}.{name}")
        return Unsupported(f"{self._file.path}: {self._architecture}.{name} is {str(value)[:80]!r}: {reason}")

    def malformed(self, reason: str) -> Malformed:
        return Malformed(f"{self._file.path} {reason}; convert the model again")

    def _get(self, name: str, default: float | None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise Malformed(f"{self._file.path} lacks {self._architecture}.{name}; convert the model again")
        return value

    def _wrong(self, name: str, value: Any) -> Malformed:
        return Malformed(
            f"{self._file.path}: {self._architecture}.{name} is {str(value)[:80]!r}; convert the model again"
        )
