from __future__ import annotations

import errno
import mmap
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.weights.errors import CheckpointError, FilesMissing, Malformed, Unsupported
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.safetensors.checkpoint import parse_header
from cortex.neuron.weights.stored import StoredTensor

from ....examples import MANY

Compose = Callable[[Any, bytes], bytes]


def parse(path: Path, raw: bytes) -> dict[str, StoredTensor]:
    path.write_bytes(raw)
    with MappedFile(path) as file:
        return parse_header(file)


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOMEM, "free memory on the host"), (errno.ENODEV, "its file system is supported")]
)
def test_file_that_cannot_be_mapped_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(8))
    with MappedFile(path) as file:
        monkeypatch.setattr(mmap, "mmap", fail)
        with pytest.raises(FilesMissing, match=f"{os.strerror(code)}; .*{remedy}"):
            _ = file.buffer


def test_valid_header_yields_the_tensors(tmp_path: Path, write_safetensors_bytes: Compose) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry(),
        "b": entry("BF16", [2, 3], [8, 20]),
        "c": entry("F32", [], [20, 24]),
    }
    raw = write_safetensors_bytes(header, bytes(24))
    tensors = parse(tmp_path / "m.safetensors", raw)
    assert {name: (t.shape, t.format, t.num_bytes) for name, t in tensors.items()} == {
        "a": ((2,), "F32", 8),
        "b": ((2, 3), "BF16", 12),
        "c": ((), "F32", 4),
    }
    assert tensors["b"].offset == len(raw) - 16


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}, "a": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        b'{"a": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        {"a": None},
        {"a": entry(dtype=None)},
        {"a": entry(shape=None)},
        {"a": entry(shape=[-2])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[True, 2])},
        {"a": entry(shape=[1 << 62, 1 << 62, 1 << 62])},
        {"a": entry(shape=[1] * 1000)},
        {"a": entry(span=[0])},
        {"a": entry(span=[8, 0])},
        {"a": entry(span=[0, 9])},
        {"a": entry(span=[-8, 0])},
        {"a": entry(span=[1 << 60, (1 << 60) + 8])},
        {"a": entry(span=["0", "8"])},
        {"a": entry(), "b": entry()},  # overlap
        {"a": entry(shape=[1], span=[4, 8])},  # gap at the start
        {"a": entry(shape=[1], span=[0, 4])},  # bytes after the last tensor
        {},
    ],
    ids=range(27),
)
def test_rejects_inconsistent_header(tmp_path: Path, write_safetensors_bytes: Compose, header: Any) -> None:
    with pytest.raises(Malformed) as caught:
        parse(tmp_path / "m.safetensors", write_safetensors_bytes(header, bytes(8)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 17 << 20, 9])
def test_excessive_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    tracemalloc.start()
    with pytest.raises(Malformed):
        parse(tmp_path / "m.safetensors", struct.pack("<Q", length) + b"{}")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_unknown_dtype_is_unsupported(tmp_path: Path, write_safetensors_bytes: Compose) -> None:
    with pytest.raises(Unsupported, match="F3"):
        parse(tmp_path / "m.safetensors", write_safetensors_bytes({"a": entry("F3")}, bytes(8)))


def test_rejects_every_truncation(tmp_path: Path, write_safetensors_bytes: Compose) -> None:
    whole = write_safetensors_bytes({"a": entry()}, bytes(8))
    for length in range(len(whole)):
        with pytest.raises(Malformed):
            parse(tmp_path / "m.safetensors", whole[:length])


@MANY
@given(data=st.data())
def test_random_damage_raises_nothing_but_checkpoint_errors(
    tmp_path: Path, write_safetensors_bytes: Compose, data: st.DataObject
) -> None:
    raw = bytearray(write_safetensors_bytes({"a": entry(), "b": entry("F16", [2, 2], [8, 16])}, bytes(16)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + 1] = data.draw(st.sampled_from([b"9", b"-", b"[", b"{", b'"', b"\0", b"\xff", b"e9", b""]))
    try:
        parse(tmp_path / "m.safetensors", bytes(raw) or b"\0")
    except CheckpointError:
        pass
