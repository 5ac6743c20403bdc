"""A quantised checkpoint on a CPU: its matrices stay quantised, and compute like the dense ones."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.execution import model_graphs, runner
from cortex.neuron.engine.execution.threads import StepThreads
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.loading.filling import fill_from
from cortex.neuron.engine.loading.loading import LoadedModel, build_model, load_model
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.cpu.native import multiplies_codes
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.native import library
from cortex.neuron.kernels.native.library import native_library_or_none
from cortex.neuron.kernels.native.operations import Recording
from cortex.neuron.layers.feed_forward import MLP
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.placement import PieceSizes

from ...engine_runs import responses, run, tokens_of

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 128, 192, 4, 2, 320
TYPES = {"Q4_0": (2, 18), "Q4_1": (3, 20), "Q8_0": (8, 34), "F32": (0, 4)}
"""Name → the id in files, and the bytes of a block of 32 (of one number for F32)."""


def blocks(kind: str, rows: int, columns: int, generator: torch.Generator) -> bytes:
    """Random values of a size that keeps activations stable."""
    if kind == "F32":
        is_norm = columns == 1
        values = torch.randn(rows * columns, generator=generator) * (0.1 if is_norm else columns**-0.5)
        return (values + is_norm).numpy().tobytes()
    scale = columns**-0.5 / (4 if kind.startswith("Q4") else 64)
    head = bytearray(struct.pack("<ee", scale, -8 * scale)[: 4 if kind == "Q4_1" else 2])
    size = (rows * columns // 32, TYPES[kind][1] - len(head))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    heads = torch.frombuffer(head, dtype=torch.uint8).expand(len(codes), -1)
    return torch.cat([heads, codes], dim=1).numpy().tobytes()


def write_model(path: Path, matrices: str, embedding: str, values: str | None = None) -> None:
    """`values`: the type of the matrices of values, as files of mixed types have it"""
    generator = torch.Generator().manual_seed(1)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": (embedding, (VOCAB, HIDDEN)),
        "output_norm.weight": ("F32", (HIDDEN,)),
    }
    for layer in range(2):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = (values or matrices if name == "attn_v" else matrices, shape)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = ("F32", (HIDDEN,))
    keys: dict[str, int | float | str] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }
    table = data = b""
    for name, (kind, size) in shapes.items():
        data += b"\0" * (-len(data) % 32)
        table += _string(name) + struct.pack("<I", len(size)) + struct.pack(f"<{len(size)}Q", *reversed(size))
        table += struct.pack("<IQ", TYPES[kind][0], len(data))
        data += blocks(kind, size[0], size[1] if len(size) > 1 else 1, generator)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(keys))
    header += b"".join(_string(key) + _value(value) for key, value in keys.items()) + table
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)


def load(
    path: Path, dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto", quant: str | None = None
) -> LoadedModel:
    return load_model(LoadSpec(str(path), dtype=dtype, quant=quant), CPU, lambda *_: None, lambda: False)


def load_in_pieces(path: Path, quant: str | None = None) -> LoadedModel:
    """Matrices arrive in as many pieces as possible."""
    spec, checkpoint, sizes = LoadSpec(str(path), quant=quant), open_checkpoint(path), PieceSizes(cached_weights=1)

    def fill(parameters: Parameters) -> None:
        fill_from(checkpoint, parameters, lambda *_: None, lambda: False, sizes)

    layouts = loading.matrix_layouts(checkpoint.tensors, spec, CPU)
    return build_model(checkpoint.config, spec, CPU, fill, layouts, tensors=checkpoint.tensors)


def answers(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after each token, one step for each."""
    table = torch.arange(1, 3, dtype=torch.int32)[None]
    logits = []
    with torch.inference_mode():
        for position, token in enumerate(tokens):
            batch = Batch(
                tokens=torch.tensor([token]),
                positions=torch.tensor([position]),
                slots=torch.tensor([32 + position]),
                rows=torch.tensor([0]),
                lengths=torch.tensor([position + 1], dtype=torch.int32),
                page_table=table,
                num_decodes=1,
                max_length=position + 1,
            )
            logits.append(loaded.model.logits(loaded.model(batch)))
    return torch.cat(logits).float()


@pytest.fixture
def packed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes count as faster on any machine that compiles."""
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: True)


@pytest.mark.usefixtures("packed_form")
@pytest.mark.parametrize("matrices", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("embedding", ["Q4_0", "Q8_0"])
def test_quantised_model_responds_like_the_dense_model(tmp_path: Path, matrices: str, embedding: str) -> None:
    write_model(tmp_path / "model.gguf", matrices, embedding)
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    packed = load_in_pieces(tmp_path / "model.gguf")
    assert not isinstance(packed.model.head.matrix, DenseMatrix)
    exact = answers(load(tmp_path / "model.gguf", "float32"), tokens)
    assert (answers(packed, tokens) - exact).norm() / exact.norm() < 0.05


@pytest.mark.usefixtures("packed_form")
@pytest.mark.parametrize(("quant", "limit"), [("q8_0", 0.06), ("q6_k", 0.12), ("q5_k", 0.25), ("q4_k", 0.45)])
def test_dense_weights_are_quantised_as_they_are_loaded(tmp_path: Path, quant: str, limit: float) -> None:
    write_model(tmp_path / "model.gguf", "F32", "F32")
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    loaded = load_in_pieces(tmp_path / "model.gguf", quant)
    feed_forward = loaded.model.layers[0].mlp
    assert isinstance(feed_forward, MLP)
    assert not isinstance(feed_forward.down.matrix, DenseMatrix)
    assert not isinstance(loaded.model.head.matrix, DenseMatrix)
    exact = answers(load(tmp_path / "model.gguf"), tokens)
    assert (answers(loaded, tokens) - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("values", [None, "Q8_0"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("threads", [1, 3])
def test_recorded_steps_draw_the_tokens_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: str | None, temperature: float, threads: int
) -> None:
    """Requests that begin and end at different times, in a model whose decode steps are recorded and replayed."""
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    write_model(tmp_path / "model.gguf", "Q4_1", "Q8_0", values)
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: True)
    monkeypatch.setattr(StepThreads, "decoding", lambda *_: nullcontext())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    replayed: list[int] = []
    replay = Recording.replay

    def counted(recording: Recording, rows: int) -> None:
        replayed.append(rows)
        replay(recording, rows)

    monkeypatch.setattr(Recording, "replay", counted)
    said: list[list[list[int]]] = []
    for capture in (model_graphs.default_capture, lambda *_, **__: None):
        monkeypatch.setattr(runner, "default_capture", capture)
        spec = LoadSpec(str(tmp_path / "model.gguf"), max_num_seqs=3, context_tokens=64, speculation="off")
        engine = Engine.load(spec, CPU, lambda *_: None, lambda: False)
        requests = [
            EngineRequest(
                str(number),
                tuple(range(number, 3 * number + 2)),
                max_tokens=3 + 4 * number,
                sampling=SamplingParams(temperature=temperature, seed=number),
            )
            for number in range(6)
        ]
        said.append([tokens_of(outputs) for outputs in run(engine, *requests).values()])
    assert set(replayed) == {1, 2, 3}
    assert said[0] == said[1]
    assert list(map(len, said[0])) == [3 + 4 * number for number in range(6)]


def test_recorded_steps_may_be_read_late_and_survive_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token have no other steps than recorded ones."""
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    write_model(tmp_path / "model.gguf", "Q4_1", "Q8_0")
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: True)
    spec = LoadSpec(str(tmp_path / "model.gguf"), max_num_seqs=3, context_tokens=64)
    said: list[list[list[int]]] = []
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr(runner, "default_capture", lambda *_, **__: None)
        loaded = load_model(spec, CPU, lambda *_: None, lambda: False)
        engine = Engine(loaded, spec, overlaps=is_recorded, moves_weights=is_recorded)
        engine.warm_up()
        for sleeps in (is_recorded, False):
            said.append(responses(engine, [(7 * number,) for number in range(3)], 9))
            if sleeps:
                engine.sleep()
                engine.wake(lambda *_: None)
    assert all(tokens == said[-1] for tokens in said), said


def test_dense_model_is_loaded_without_measuring_quantised_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model.gguf", "F32", "F32")
    monkeypatch.delattr(loading, "multiplies_codes")
    assert isinstance(load(tmp_path / "model.gguf").model.head.matrix, DenseMatrix)
    write_model(tmp_path / "model.gguf", "F32", "Q8_0")
    with pytest.raises(NameError, match="multiplies_codes"):
        load(tmp_path / "model.gguf")


def test_quantising_at_load_is_rejected_where_no_product_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model.gguf", "F32", "F32")
    with pytest.raises(LoadError, match="cannot be quantised as q4_k at load here"):
        load(tmp_path / "model.gguf", "float32", quant="q4_k")
    with pytest.raises(LoadError, match="cannot be quantised as fp8 at load here"):
        load(tmp_path / "model.gguf", quant="fp8")
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: False)
    with pytest.raises(LoadError, match="cannot be quantised as q4_k at load here"):
        load(tmp_path / "model.gguf", quant="q4_k")


@pytest.mark.usefixtures("packed_form")
@pytest.mark.parametrize("matrices", ["Q4_0", "Q8_0"])
def test_divided_quantised_model_responds_like_the_whole_one(tmp_path: Path, matrices: str) -> None:
    """Each rank reads whole blocks of the file, and keeps its own share quantised."""
    path = tmp_path / "model.gguf"
    write_model(path, matrices, "Q8_0")
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(2)).tolist()

    def divided(rank: RankSpec) -> torch.Tensor:
        group = TorchGroup.join(rank, CPU, lambda: None)
        spec = LoadSpec(str(path), rank=rank)
        loaded = load_model(spec, CPU, lambda *_: None, lambda: False, group)
        feed_forward = loaded.model.layers[0].mlp
        assert isinstance(feed_forward, MLP)
        assert not isinstance(feed_forward.down.matrix, DenseMatrix)
        return answers(loaded, tokens)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(divided, [RankSpec(rank, 2, str(tmp_path)) for rank in range(2)])
    assert torch.equal(first, second)
    exact = answers(load(path, "float32"), tokens)
    assert (first - exact).norm() / exact.norm() < 0.05


@pytest.mark.usefixtures("packed_form")
@pytest.mark.parametrize("matrices", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_take_at_most_a_third_more_than_the_file(tmp_path: Path, matrices: str) -> None:
    write_model(tmp_path / "model.gguf", matrices, "Q8_0")
    loaded = load(tmp_path / "model.gguf")
    num_bytes = loaded.model.parameters.num_bytes
    assert loaded.weight_bytes == num_bytes + loaded.model.ropes.num_bytes
    assert sum(storage.nbytes() for storage in loaded.model.parameters.storages()) == num_bytes
    assert num_bytes <= 1.3 * (tmp_path / "model.gguf").stat().st_size


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cached = (native_library_or_none, multiplies_codes)
    for function in cached:
        function.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(library, "compiler", lambda: None)
        yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_weights_are_dense_without_a_c_compiler(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "Q4_0", "Q8_0")
    tokens = list(range(12))
    loaded = load(tmp_path / "model.gguf")
    assert isinstance(loaded.model.head.matrix, DenseMatrix)
    exact = answers(load(tmp_path / "model.gguf", "float32"), tokens)
    assert (answers(loaded, tokens) - exact).norm() / exact.norm() < 0.05


@pytest.mark.usefixtures("packed_form")
def test_requested_dtype_keeps_the_dense_form(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "Q4_1", "Q8_0")
    assert isinstance(load(tmp_path / "model.gguf", "float32").model.head.matrix, DenseMatrix)


def test_keeps_the_dense_form_if_no_other_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "multiplies_codes", lambda _: False)
    write_model(tmp_path / "model.gguf", "Q4_1", "Q8_0")
    loaded = load(tmp_path / "model.gguf")
    assert isinstance(loaded.model.head.matrix, DenseMatrix)
    assert loaded.model.parameters.packed_bindings == []
