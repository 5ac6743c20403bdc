"""Damaged GGUF files over HTTP: an error that names tensor and reason, nothing left behind, and the next load works."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from ....waiting import wait_until
from .gguf_files import write_gguf

if TYPE_CHECKING:
    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

TENSOR = "blk.1.ffn_up.weight"
OTHER = "blk.1.ffn_down.weight"
MEBIBYTE = 1 << 20


Damage = Callable[[bytearray, int], None]
"""Takes the bytes of the file, and where those of `TENSOR` begin."""


class TensorRow:
    """Where the header describes a tensor: name, number of dimensions, dimensions, format, offset."""

    def __init__(self, raw: bytearray, name: str) -> None:
        at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        self.shape = at + 4
        self.format = self.shape + 8 * struct.unpack_from("<I", raw, at)[0]
        self.offset = self.format + 4


def unknown_format(raw: bytearray, _: int) -> None:
    struct.pack_into("<I", raw, TensorRow(raw, TENSOR).format, 77)


def unreadable_format(raw: bytearray, _: int) -> None:
    struct.pack_into("<I", raw, TensorRow(raw, TENSOR).format, gguf.GGMLQuantizationType.I8)


def not_gguf(raw: bytearray, _: int) -> None:
    raw[:] = b"Dear reader, " * 100


def unknown_architecture(raw: bytearray, _: int) -> None:
    at = raw.index(b"llama", raw.index(b"general.architecture"))
    raw[at : at + 5] = b"zebra"


def truncated(raw: bytearray, _: int) -> None:
    del raw[-100:]


def out_of_range(raw: bytearray, _: int) -> None:
    struct.pack_into("<Q", raw, TensorRow(raw, TENSOR).offset, 1 << 40)


def offset_wraps(raw: bytearray, _: int) -> None:
    struct.pack_into("<Q", raw, TensorRow(raw, TENSOR).offset, (1 << 64) - 32)


def overlapping(raw: bytearray, _: int) -> None:
    row, other = TensorRow(raw, TENSOR).offset, TensorRow(raw, OTHER).offset
    raw[row : row + 8] = raw[other : other + 8]


def broken_rows(raw: bytearray, _: int) -> None:
    struct.pack_into("<Q", raw, TensorRow(raw, TENSOR).shape, 33)


def absurd_shape(raw: bytearray, _: int) -> None:
    struct.pack_into("<QQ", raw, TensorRow(raw, TENSOR).shape, 1 << 62, 1 << 62)


def other_shape(raw: bytearray, _: int) -> None:
    struct.pack_into("<QQ", raw, TensorRow(raw, TENSOR).shape, 32, 256)


def absurd_tensor_count(raw: bytearray, _: int) -> None:
    struct.pack_into("<Q", raw, 8, 1 << 60)


def absurd_key_count(raw: bytearray, _: int) -> None:
    struct.pack_into("<Q", raw, 16, 1 << 60)


def scale_of(number: float) -> Damage:
    def damage(raw: bytearray, data: int) -> None:
        raw[data : data + 2] = np.float16(number).tobytes()

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no GGUF": (not_gguf, "m.gguf is not a GGUF file"),
    "unknown architecture": (unknown_architecture, "zebra"),
    "unknown format": (unknown_format, f"'{TENSOR}' has the unknown number format 77"),
    "unreadable format": (unreadable_format, f"{TENSOR} is in I8, which is not supported; choose a file in one of"),
    "truncated data": (truncated, "ends at byte"),
    "offset out of range": (out_of_range, f"'{TENSOR}' ends at byte"),
    "offset wraps": (offset_wraps, f"'{TENSOR}' ends at byte"),
    "overlap": (overlapping, "overlap"),
    "rows of parts of blocks": (broken_rows, f"'{TENSOR}' have 33 elements, not whole Q8_0 blocks"),
    "absurd shape": (absurd_shape, f"'{TENSOR}' ends at byte"),
    "another shape": (other_shape, "is this the model its config describes?"),
    "absurd tensor count": (absurd_tensor_count, "more than the limit"),
    "absurd key count": (absurd_key_count, "more than the limit"),
    "scale is not a number": (scale_of(float("nan")), f"{TENSOR} in Q8_0 has scales that are not finite"),
    "scale is infinite": (scale_of(float("inf")), f"{TENSOR} in Q8_0 has scales that are not finite"),
}


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A good file, and where the bytes of `TENSOR` begin."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path, tiny_model, "Q8_0")
    (data,) = [tensor.data_offset for tensor in gguf.GGUFReader(path).tensors if tensor.name == TENSOR]
    return path.read_bytes(), int(data)


def users_of(path: Path) -> list[str]:
    """Processes that have the file open or mapped."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                mapped = str(path) in (process / "maps").read_text()
                opened = any(link.readlink() == path for link in (process / "fd").iterdir())
            except OSError:
                continue  # ended between the listing and the look, or another user's
            if mapped or opened:
                found.append(process.name)
    return found


UNSUPPORTED = ("unknown architecture", "unknown format", "unreadable format")
REPAIRED = ("no GGUF", "unreadable format", "truncated data", "scale is infinite")
"""One damage of each part: the header, the format of a tensor, the length of the file, and the weights themselves."""


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_file_is_rejected_by_tensor_and_reason_and_loads_once_it_is_repaired(
    daemon: Daemon, whole: tuple[bytes, int], tmp_path: Path, kind: str
) -> None:
    damage, reason = DAMAGES[kind]
    good, data = whole
    raw = bytearray(good)
    damage(raw, data)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    load = {"model_id": f"damaged-{kind.replace(' ', '-')}", "source": str(path)}
    before = daemon.held_bytes()
    status, rejection = daemon.call("/models/load", load)
    is_in_header = "scale" not in kind and "another" not in kind
    failed = (502, "files_damaged" if is_in_header else "load_failed")
    expected = (422, "model_unsupported") if kind in UNSUPPORTED else failed
    assert (status, rejection["error"]["code"]) == expected, rejection
    assert reason in rejection["error"]["message"]
    model = daemon.model(load["model_id"])
    assert (model["state"], model["measured_bytes"], model["reason"]) == ("failed", None, rejection["error"]["message"])
    wait_until(lambda: not users_of(path), lambda: f"used by {users_of(path)}")  # the tokenizer process may be ending
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
    if is_in_header:  # nothing was started to read weights
        assert daemon.held_bytes() - before < 64 * MEBIBYTE
    if kind not in REPAIRED:
        return
    path.write_bytes(good)
    assert daemon.call("/models/load", load)[0] == 200
    daemon.wait_ready(load["model_id"])
    assert daemon.complete(load["model_id"])[0] == 200
    assert daemon.call("/models/unload", load)[0] == 200
