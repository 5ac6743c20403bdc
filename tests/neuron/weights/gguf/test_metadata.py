from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.weights.errors import CheckpointError, FilesMissing, Malformed, Unsupported
from cortex.neuron.weights.gguf.metadata import read_metadata
from cortex.neuron.weights.gguf.types import GGMLType

from ....examples import MANY

Writer = Callable[[], Any]


def valid(writer: Any) -> Any:
    writer.add("general.architecture", "llama").add("llama.block_count", 2).add("llama.eps", 1e-5)
    writer.add("tokenizer.ggml.tokens", ["a", "Ġb", "ü"]).add("tokenizer.ggml.token_type", [1, -1, 3])
    writer.add("tokenizer.ggml.add_bos_token", True)
    writer.add_float("token_embd.weight", torch.ones(4, 3)).add_float("output_norm.weight", torch.ones(3))
    return writer


def write(tmp_path: Path, writer: Any) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(writer.build())
    return path


def test_valid_file_is_parsed_completely(tmp_path: Path, gguf_writer: Writer) -> None:
    file = read_metadata(write(tmp_path, valid(gguf_writer())))

    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.eps"] == pytest.approx(1e-5)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb", "ü"]
    assert file.metadata["tokenizer.ggml.token_type"] == [1, -1, 3]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    embedding = file.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type, embedding.num_bytes) == ((4, 3), GGMLType.F32, 48)
    assert embedding.offset % 32 == 0
    raw = file.path.read_bytes()[embedding.offset : embedding.offset + embedding.num_bytes]
    assert struct.unpack("<12f", raw) == (1.0,) * 12


def test_token_with_a_partial_character_is_read_with_a_replacement(tmp_path: Path, gguf_writer: Writer) -> None:
    writer = gguf_writer()
    writer.add_raw("tokens", struct.pack("<IIQ", 9, 8, 1) + writer.string(b"\xc3"))
    assert read_metadata(write(tmp_path, writer)).metadata["tokens"] == ["�"]


def test_nested_arrays_become_lists_of_lists(tmp_path: Path, gguf_writer: Writer) -> None:
    inner = struct.pack("<IQ", 5, 2) + struct.pack("<2i", 1, 2)
    writer = gguf_writer().add_raw("nested", struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    assert read_metadata(write(tmp_path, writer)).metadata["nested"] == [[1, 2], [1, 2]]


def test_metadata_module_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; import cortex.neuron.weights.gguf.metadata, cortex.neuron.weights.checkpoint; "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    source = str(Path(__file__).parents[4] / "src")
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": source}, check=False).returncode == 0


def huge_string(writer: Any) -> None:
    writer.add_raw("key", struct.pack("<IQ", 8, 1 << 62))


def huge_array(writer: Any) -> None:
    writer.add_raw("key", struct.pack("<IIQ", 9, 4, 1 << 60))


def huge_string_array(writer: Any) -> None:
    writer.add_raw("key", struct.pack("<IIQ", 9, 8, 1 << 40))


def deep_arrays(writer: Any) -> None:
    writer.add_raw("key", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000)


def unknown_value_type(writer: Any) -> None:
    writer.add_raw("key", struct.pack("<I", 99))


def key_twice(writer: Any) -> None:
    writer.add("key", 1).add("key", 2)


def key_not_text(writer: Any) -> None:
    writer.keys.append(("key", b""))
    writer.string = lambda text: struct.pack("<Q", 2) + b"\xff\xff"


def tensor_twice(writer: Any) -> None:
    writer.add_float("same", torch.ones(8)).add_float("same", torch.ones(8))


def zero_extent(writer: Any) -> None:
    writer.add_tensor("empty", (0, 4), 0, b"")


def too_many_dimensions(writer: Any) -> None:
    writer.add_tensor("deep", (1,) * 5, 0, bytes(4))


def overflowing_shape(writer: Any) -> None:
    writer.add_tensor("vast", ((1 << 63), (1 << 63), 1 << 63, 1 << 63), 0, bytes(4))


def out_of_file(writer: Any) -> None:
    writer.add_float("far", torch.ones(8)).offsets["far"] = 1 << 40


def offset_wraps(writer: Any) -> None:
    writer.add_float("wraps", torch.ones(8)).offsets["wraps"] = (1 << 64) - 32


def misaligned(writer: Any) -> None:
    writer.add_float("odd", torch.ones(64)).offsets["odd"] = 4


def overlapping(writer: Any) -> None:
    writer.add_float("one", torch.ones(16)).add_float("two", torch.ones(16)).offsets["two"] = 32


def broken_row(writer: Any) -> None:
    writer.add_tensor("row", (2, 16), GGMLType.Q4_0, bytes(64))


def odd_alignment(writer: Any) -> None:
    writer.add("general.alignment", 24)


def alignment_as_text(writer: Any) -> None:
    writer.add("general.alignment", "32")


def wrong_magic(writer: Any) -> None:
    writer.magic = b"GGML"


def excessive_tensor_count(writer: Any) -> None:
    writer.num_tensors = 1 << 63


def excessive_key_count(writer: Any) -> None:
    writer.num_keys = 1 << 63


def missing_tensor_rows(writer: Any) -> None:
    writer.num_tensors = 100


DAMAGES = [
    huge_string,
    huge_array,
    huge_string_array,
    deep_arrays,
    unknown_value_type,
    key_twice,
    key_not_text,
    tensor_twice,
    zero_extent,
    too_many_dimensions,
    overflowing_shape,
    out_of_file,
    offset_wraps,
    misaligned,
    overlapping,
    broken_row,
    odd_alignment,
    alignment_as_text,
    wrong_magic,
    excessive_tensor_count,
    excessive_key_count,
    missing_tensor_rows,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_rejects_an_inconsistent_file_with_a_one_line_error(
    tmp_path: Path, gguf_writer: Writer, damage: Callable[[Any], None]
) -> None:
    writer = gguf_writer()
    damage(writer)
    path = write(tmp_path, writer)
    tracemalloc.start()
    with pytest.raises(Malformed) as caught:
        read_metadata(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_rejects_other_versions_as_unsupported(tmp_path: Path, gguf_writer: Writer, version: int) -> None:
    writer = gguf_writer()
    writer.version = version
    with pytest.raises(Unsupported):
        read_metadata(write(tmp_path, writer))


def test_rejects_an_unknown_number_format_as_unsupported(tmp_path: Path, gguf_writer: Writer) -> None:
    with pytest.raises(Unsupported, match="number format 77"):
        read_metadata(write(tmp_path, gguf_writer().add_tensor("new", (32,), 77, bytes(32))))


def test_rejects_every_truncation(tmp_path: Path, gguf_writer: Writer) -> None:
    whole = valid(gguf_writer()).build()
    path = tmp_path / "model.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Malformed):
            read_metadata(path)


def test_path_that_is_no_regular_file_raises_files_missing(tmp_path: Path) -> None:
    import os

    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (tmp_path / "absent.gguf", tmp_path, pipe):
        with pytest.raises(FilesMissing):
            read_metadata(path)


@MANY
@given(data=st.data())
def test_random_damage_raises_only_checkpoint_errors(tmp_path: Path, gguf_writer: Writer, data: st.DataObject) -> None:
    raw = bytearray(valid(gguf_writer()).build())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        raw[at : at + len(patch)] = patch
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    try:
        read_metadata(path)
    except CheckpointError:
        pass
