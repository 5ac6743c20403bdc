"""Writers of valid and broken model files, from the definitions of the formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch


@dataclass
class GGUFWriter:
    """Composes a GGUF file. Every part can be made invalid."""

    keys: list[tuple[str, bytes]] = field(default_factory=list)
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_tensors: int | None = None
    num_keys: int | None = None
    offsets: dict[str, int] = field(default_factory=dict)

    def string(self, text: str | bytes) -> bytes:
        raw = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(raw)) + raw

    def value(self, value: Any) -> bytes:
        if isinstance(value, bool):
            return struct.pack("<IB", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + self.string(value)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(self.string, value))
        if isinstance(value, list):
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        raise TypeError(value)

    def add(self, key: str, value: Any) -> GGUFWriter:
        return self.add_raw(key, self.value(value))

    def add_raw(self, key: str, typed_value: bytes) -> GGUFWriter:
        self.keys.append((key, typed_value))
        return self

    def add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, data: bytes) -> GGUFWriter:
        self.tensors.append((name, shape, type_id, data))
        return self

    def add_float(self, name: str, tensor: torch.Tensor) -> GGUFWriter:
        return self.add_tensor(name, tuple(tensor.shape), 0, tensor.contiguous().numpy().tobytes())

    def build(self) -> bytes:
        keys = b"".join(self.string(key) + value for key, value in self.keys)
        table, data = b"", b""
        for name, shape, type_id, raw in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = self.offsets.get(name, len(data))
            table += self.string(name) + struct.pack("<I", len(shape))
            table += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", type_id, offset)
            data += raw
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        header = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_keys) + keys + table
        return header + b"\0" * (-len(header) % self.alignment) + data


@pytest.fixture
def gguf_writer() -> Callable[[], GGUFWriter]:
    return GGUFWriter


def safetensors_bytes(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def encode_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    table = json.dumps(header).encode()
    return safetensors_bytes(table + b" " * (-len(table) % 8), data)


@pytest.fixture
def write_safetensors_bytes() -> Callable[[Any, bytes], bytes]:
    return safetensors_bytes


@pytest.fixture
def model_directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory of one or several safetensors files."""

    def write(*shards: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        if len(shards) == 1:
            (directory / "model.safetensors").write_bytes(encode_safetensors(shards[0]))
            return directory
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            (directory / name).write_bytes(encode_safetensors(shard))
            weight_map |= dict.fromkeys(shard, name)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    return write
