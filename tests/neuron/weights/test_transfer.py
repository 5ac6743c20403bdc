from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from cortex.neuron.weights.errors import Cancelled, Malformed, TensorMissing
from cortex.neuron.weights.placement import PieceSizes, Placement, Target
from cortex.neuron.weights.transfer import Buffer, Readers, load_into

Directory = Callable[..., Path]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


SMALL = PieceSizes(num_bytes=100, pinned_bytes=400)
"""So small that most tensors here are read in several pieces."""


def fill(checkpoint: Checkpoint, *placements: Placement) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    load_into(
        checkpoint,
        placements,
        progress=lambda done, total: reports.append((done, total)),
        cancelled=lambda: False,
        sizes=SMALL,
    )
    return reports


@pytest.mark.parametrize("device", DEVICES)
def test_fused_destinations_are_filled_in_their_own_dtype(model_directory: Directory, device: str) -> None:
    source = {name: torch.randn(rows, 6) for name, rows in (("q", 50), ("k", 20), ("v", 20))}
    source |= {"norm": torch.randn(6), "scalar": torch.tensor(3.0), "empty": torch.empty(3, 0)}
    checkpoint = open_checkpoint(model_directory(source))
    fused = torch.full((90, 6), torch.nan, dtype=torch.bfloat16, device=device)
    parts = dict(zip("qkv", fused.split([50, 20, 20]), strict=True))
    others = {name: torch.empty(source[name].shape, device=device) for name in ("norm", "scalar", "empty")}

    reports = fill(checkpoint, *(Placement(name, place) for name, place in (parts | others).items()))

    expected = torch.cat([source[name] for name in "qkv"]).bfloat16()
    assert torch.equal(fused.cpu(), expected)
    for name, place in others.items():
        assert torch.equal(place.cpu(), source[name])
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)
    assert len(reports) > 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "select",
    [
        (slice(10, 31),),
        (slice(None), slice(2, 5)),
        (slice(40, 50), slice(0, 3)),
        (slice(-7, None),),
        (slice(5, 5),),
    ],
    ids=str,
)
def test_selection_of_a_tensor_is_loaded(model_directory: Directory, device: str, select: tuple[slice, ...]) -> None:
    source = torch.randn(50, 6)
    expected = source[select]
    # A strided destination: one of two columns of a larger tensor.
    place = torch.zeros(*expected.shape, 2, device=device)[..., 0]
    fill(open_checkpoint(model_directory({"w": source})), Placement("w", place, select))
    assert torch.equal(place.cpu(), expected)


def test_reads_only_the_selected_rows(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"w": torch.randn(100, 4)}))
    reports = fill(checkpoint, Placement("w", torch.empty(25, 4), (slice(25, 50),)))
    assert reports[-1] == (25 * 16, 25 * 16)


@pytest.mark.parametrize("device", DEVICES)
def test_transform_receives_the_whole_selection_on_the_destination_device(
    model_directory: Directory, device: str
) -> None:
    source = {"w": torch.randn(40, 1, 6), "scale": torch.tensor(2.0)}
    place, scale = torch.empty(6, 30, device=device), torch.empty(1, device=device)

    def turn(whole: torch.Tensor) -> torch.Tensor:
        assert whole.device.type == device
        assert whole.shape == (30, 1, 6)
        return whole.squeeze(1).T

    fill(
        open_checkpoint(model_directory(source)),
        Placement("w", place, (slice(5, 35),), turn, shape=(30, 1, 6)),
        Placement("scale", scale, transform=lambda whole: whole.view(1), shape=()),
    )
    assert torch.equal(place.cpu(), source["w"][5:35].squeeze(1).T)
    assert scale.item() == 2


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (5, 3, 1)])
def test_a_transform_never_sees_another_shape_than_the_declared_one(
    model_directory: Directory, shape: tuple[int, ...]
) -> None:
    checkpoint = open_checkpoint(model_directory({"w": torch.randn(shape)}))
    cut = Placement("w", torch.empty(2, 3), transform=lambda whole: whole.narrow(0, 3, 2), shape=(5, 3))
    with pytest.raises(TensorMissing, match=r"the model needs \(5, 3\)"):
        fill(checkpoint, cut)


def test_rejects_a_transform_that_returns_another_shape(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"w": torch.randn(4, 4)}))
    with pytest.raises(TensorMissing, match=r"becomes \(1, 4\), the model needs \(4, 4\)"):
        fill(checkpoint, Placement("w", torch.empty(4, 4), transform=lambda whole: whole[:1]))


@pytest.mark.parametrize("device", DEVICES)
def test_quantised_and_interleaved_tensors_are_loaded_as_read_returns_them(
    tmp_path: Path, gguf_writer: Callable[[], Any], device: str
) -> None:
    writer = gguf_writer().add("general.architecture", "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }.items():
        writer.add(f"llama.{key}", value)
    writer.add_float("token_embd.weight", torch.randn(8, 32))
    blocks = torch.randint(0, 256, (32, 18), dtype=torch.uint8)
    blocks[:, :2] = torch.randn(32, 1).half().view(torch.uint8)
    writer.add_tensor("blk.0.attn_q.weight", (32, 32), 2, blocks.numpy().tobytes())
    (tmp_path / "m.gguf").write_bytes(writer.build())
    checkpoint = open_checkpoint(tmp_path / "m.gguf")

    name = "model.layers.0.self_attn.q_proj.weight"
    whole, share = torch.empty(32, 32, device=device), torch.empty(10, 32, device=device)
    fill(checkpoint, Placement(name, whole), Placement(name, share, (slice(13, 23),)))
    assert torch.equal(whole.cpu(), checkpoint.read(name))
    assert torch.equal(share.cpu(), checkpoint.read(name)[13:23])


def test_rejects_wrong_names_and_shapes_before_any_transfer(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}))
    place = torch.zeros(2, 2)
    for wrong in (Placement("c", torch.zeros(2, 2)), Placement("b", torch.zeros(2, 3)), Placement("b", torch.zeros(4))):
        with pytest.raises(TensorMissing):
            fill(checkpoint, Placement("a", place), wrong)
    assert place.sum() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_cancelled_load_ends_and_leaves_no_threads(model_directory: Directory, device: str) -> None:
    checkpoint = open_checkpoint(model_directory({"w": torch.randn(1000, 4)}))
    place = torch.empty(1000, 4, device=device)
    done: list[int] = []
    with pytest.raises(Cancelled):
        load_into(
            checkpoint,
            [Placement("w", place)],
            progress=lambda done_bytes, total_bytes: done.append(done_bytes),
            cancelled=lambda: bool(done) and done[-1] > 3000,
            sizes=SMALL,
        )
    assert done[-1] < 16000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-reader")]


def test_file_that_shrinks_during_the_read_raises_malformed(model_directory: Directory) -> None:
    directory = model_directory({"w": torch.randn(1000, 4)})
    checkpoint = open_checkpoint(directory)
    pieces = list(Target(Placement("w", torch.empty(1000, 4)), checkpoint.stored("w"), SMALL).pieces())
    os.truncate(directory / "model.safetensors", 5000)
    memory = memoryview(bytearray(100))
    buffers = [Buffer(torch.frombuffer(memory, dtype=torch.uint8), memory) for _ in range(2)]

    def drain() -> None:
        with Readers(pieces, buffers) as readers:
            while True:
                filled = readers.next_filled(1)
                assert filled is not None
                readers.release(filled[1])

    with pytest.raises(Malformed, match=r"ends at byte 5\d\d\d while it is being read"):
        drain()


def test_rejects_destinations_on_two_devices(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"a": torch.ones(2)}))
    with pytest.raises(ValueError, match="several devices"):
        fill(checkpoint, Placement("a", torch.empty(2)), Placement("a", torch.empty(2, device="meta")))


@pytest.mark.parametrize("device", DEVICES)
def test_finished_load_keeps_no_reference_to_the_destinations(model_directory: Directory, device: str) -> None:
    checkpoint = open_checkpoint(model_directory({"w": torch.ones(4)}))
    place = torch.empty(4, device=device)
    reference = weakref.ref(place)
    gc.disable()
    try:
        fill(checkpoint, Placement("w", place, transform=lambda whole: whole + 1))
        assert place.tolist() == [2] * 4
        del place
        assert reference() is None
    finally:
        gc.enable()
