"""Loading: errors are one line, and neither a failed load nor a closed engine leaves anything behind."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import InsufficientMemory, LoadCancelled, LoadError
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.memory.device import DeviceMemory
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.layers.parallel import SingleRank

from ...engine_runs import run
from ...tiny_models import tiny_sizes

CPU = torch.device("cpu")
VOCAB = 20_000
"""Large enough for a leaked model to show in the process's memory."""
CONTEXT = 256


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, max_position_embeddings=CONTEXT)
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(path: Path, progress: Callable[[str, int, int], None] = lambda *_: None, **changes: Any) -> Engine:
    return Engine.load(LoadSpec(str(path), **({"dtype": "float32"} | changes)), CPU, progress, lambda: False)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def live_tensors() -> int:
    """Bytes of all live tensors."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    }
    return sum(storages.values())


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_loaded_engine_reports_its_info(checkpoint: Path) -> None:
    engine = load(checkpoint)
    info = engine.info
    assert (info.family, info.dtype, info.vocab_size, info.context_tokens) == ("llama", "float32", VOCAB, CONTEXT)
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    table_bytes = CONTEXT * 12 * 4
    assert 0 <= stored + table_bytes - info.weight_bytes < 10_000
    assert info.kv_bytes == (info.num_pages + 1) * info.page_tokens * 2 * 2 * 2 * 12 * 4
    assert info.notes == ()
    assert not is_mapped(checkpoint), "the files are still mapped"
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_requested_dtype(checkpoint: Path, dtype: str) -> None:
    engine = load(checkpoint, dtype=dtype)
    assert engine.info.dtype == dtype
    outputs = run(engine, EngineRequest("r", (1, 2, 3), 4, SamplingParams(temperature=0.0)))["r"]
    assert outputs[-1].finish == "length"
    engine.close()


@pytest.mark.parametrize(("asked", "given"), [(100, 100), (CONTEXT, CONTEXT), (10 * CONTEXT, CONTEXT), (None, CONTEXT)])
def test_context_is_the_requested_one_or_the_models_own(checkpoint: Path, asked: int | None, given: int) -> None:
    engine = load(checkpoint, context_tokens=asked)
    assert engine.info.context_tokens == given
    engine.close()


def test_progress_is_monotonic_and_ends_with_all_bytes(checkpoint: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    engine = load(checkpoint, lambda stage, done, total: progress.append((stage, done, total)))
    stages = [stage for stage, _, _ in progress]
    assert sorted(set(stages), key=stages.index) == ["resolve", "read", "place", "warm"]
    read = [(done, total) for stage, done, total in progress if stage == "read"]
    assert [done for done, _ in read] == sorted(done for done, _ in read)
    assert read[-1][0] == read[-1][1] > 0
    engine.close()


def test_engine_can_step_while_another_loads(checkpoint: Path) -> None:
    """No mode of the loader (default dtype, default device, inference) affects the progress callback."""
    running = load(checkpoint)
    request = EngineRequest("r", (1, 2, 3), 12, SamplingParams(temperature=0.0))
    running.submit(request)
    expected = [token for _ in range(12) for output in running.step() for token in output.tokens]
    running.submit(request)
    said: list[int] = []

    def progress(*_: object) -> None:
        assert torch.get_default_dtype() == torch.float32
        assert not torch.is_inference_mode_enabled()
        said.extend(token for output in running.step() for token in output.tokens)

    other = load(checkpoint, progress, dtype="bfloat16")
    while running.has_work:
        progress()
    assert said == expected
    other.close()
    running.close()


def test_rejects_an_unsupported_family_and_names_the_nearest(checkpoint: Path) -> None:
    change_config(checkpoint, model_type="qwen9")
    with pytest.raises(LoadError, match="'qwen9' is not supported") as rejected:
        load(checkpoint)
    for part in ("qwen3", "docs/models.md", "docs/adding-a-model.md"):
        assert part in str(rejected.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": ...}, "no 'vocab_size'"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"hidden_size": 64}, "the model needs"),
        ({"tie_word_embeddings": False, "vocab_size": VOCAB + 1}, "the model needs"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope"),
        ({"rope_parameters": "none"}, "rope"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"quantization_config": {"quant_method": "hqq"}}, "the weights are quantised (hqq)"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "the weights are quantised (modelopt NVFP4)",
        ),
        ({"quantization": {"bits": 4, "group_size": 64}}, "the weights are quantised (method not named, as MLX does)"),
        ({"quantization_config": {"bits": 4}}, "the model's unquantised repository, or a GGUF file"),
        ({"text_config": {"quantization_config": {"quant_method": "aqlm"}}}, "the weights are quantised (aqlm)"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ],
    ids=str,
)
def test_rejects_an_invalid_config_in_one_line(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(LoadError) as rejected:
        load(checkpoint)
    assert message in str(rejected.value)
    assert "\n" not in str(rejected.value)
    del rejected  # its frames hold views of the files
    gc.collect()
    assert not is_mapped(checkpoint)


def test_rejects_a_truncated_file(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load(checkpoint)
    assert not is_mapped(checkpoint)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_rejects_a_missing_file_by_name(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(LoadError, match=r"config\.json|no \*\.safetensors"):
        load(checkpoint)


def test_rejects_a_model_that_does_not_fit_without_allocating(checkpoint: Path) -> None:
    before = live_tensors()
    with pytest.raises(LoadError) as rejected:
        load(checkpoint, memory_bytes=5_000_000)
    assert re.search(
        r"the model needs \d+ MiB on cpu \(weights \d+ MiB .* but \d+ MiB can be used", str(rejected.value)
    )
    assert not isinstance(rejected.value, InsufficientMemory), "unloading other models would not help"
    assert "raise the `memory_mb`" in str(rejected.value)
    del rejected
    assert live_tensors() <= before


def test_rejects_a_load_if_the_reserve_leaves_nothing(checkpoint: Path) -> None:
    with pytest.raises(InsufficientMemory, match=r"but 0\.0 GiB can be used"):
        load(checkpoint, min_free_bytes=1 << 60)


def test_load_leaves_room_for_penalties(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are allocated when a request first uses one, long after the pages have taken the rest."""
    whole = load(checkpoint)
    page_bytes = whole.info.kv_bytes // (whole.info.num_pages + 1)
    free_bytes = whole.info.weight_bytes + 9 * page_bytes
    monkeypatch.setattr(loading, "device_memory", lambda *_: DeviceMemory(1 << 40, free_bytes, 0))
    monkeypatch.setattr(loading, "penalty_bytes", lambda *_: 0)
    without = load(checkpoint)
    monkeypatch.setattr(loading, "penalty_bytes", lambda *_: 3 * page_bytes)
    left = load(checkpoint)
    assert without.info.num_pages - left.info.num_pages == 3
    for engine in (whole, without, left):
        engine.close()


def test_context_limited_by_memory_is_noted(checkpoint: Path) -> None:
    whole = load(checkpoint)
    page_bytes = whole.info.kv_bytes // (whole.info.num_pages + 1)
    engine = load(checkpoint, memory_bytes=whole.info.weight_bytes + 5 * page_bytes)
    assert engine.info.num_pages == 4
    assert engine.info.context_tokens == 4 * engine.info.page_tokens
    assert engine.info.notes == (f"context limited to {4 * engine.info.page_tokens} of {CONTEXT} tokens by memory",)
    engine.close()
    whole.close()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelled_load_leaves_nothing(checkpoint: Path, after: int) -> None:
    before = live_tensors()
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    with pytest.raises(LoadCancelled, match="cancelled"):
        Engine.load(LoadSpec(str(checkpoint), dtype="float32"), CPU, lambda *_: None, cancelled)
    assert live_tensors() <= before
    assert not is_mapped(checkpoint)


def test_closed_engine_frees_everything(checkpoint: Path) -> None:
    before = live_tensors()
    engine = load(checkpoint)
    assert live_tensors() > before + 7_000_000
    engine.submit(EngineRequest("r", (1, 2, 3), 4, SamplingParams(frequency_penalty=0.5)))
    engine.step()
    engine.close()
    assert live_tensors() <= before + 1000


def test_memory_stays_flat_over_many_loads(checkpoint: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def cycle() -> None:
        engine = load(checkpoint, max_num_seqs=4)
        engine.submit(EngineRequest("r", tuple(range(40)), 3))
        while engine.has_work:
            engine.step()
        weight_bytes.append(engine.info.weight_bytes)
        engine.close()

    weight_bytes: list[int] = []
    for _ in range(4):
        cycle()
    before = resident_bytes()
    for _ in range(8):
        cycle()
    assert resident_bytes() - before < 4 * weight_bytes[0]


class BesideSmallerCard(SingleRank):
    """A group whose other rank captures smaller graphs of prompts."""

    num_bytes = 0

    def smallest(self, counts: Sequence[int]) -> list[int]:
        return [*counts[:-1], min(counts[-1], 128)]


def test_ranks_capture_the_graphs_that_all_of_them_have_room_for(written: Path) -> None:
    def captured(group: BesideSmallerCard | None, **changes: Any) -> int:
        spec = LoadSpec(str(written), dtype="float32", **changes)
        return loading.load_model(spec, CPU, lambda *_: None, lambda: False, group).graph_tokens

    assert captured(BesideSmallerCard()) == 128 < captured(None)
    assert captured(None, deterministic=True) == 0


class Compiling:
    """Takes the place of a `KernelPass`."""

    is_cached = False
    is_closed = False
    has_failed = False

    def ready(self, poll: Callable[[], None]) -> None:
        poll()

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("place", ["SequenceMemory", "Decoder", "compile", "warm", None])
def test_load_that_fails_compiles_no_more_kernels(
    written: Path, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    compiling = Compiling()
    monkeypatch.setattr(loading, "kernel_pass", lambda *_: compiling)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    def progress(stage: str, *_: int) -> None:
        if stage == place:
            fail()

    if place is None:
        load(written, progress).close()
    else:
        if place[0].isupper():
            monkeypatch.setattr(loading, place, fail)
        with pytest.raises(torch.OutOfMemoryError):
            load(written, progress)
    assert compiling.is_closed


def test_load_is_cancelled_while_kernels_are_compiled(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "kernel_pass", lambda *_: Compiling())
    stages: list[str] = []
    with pytest.raises(LoadCancelled):
        Engine.load(
            LoadSpec(str(written), dtype="float32"),
            CPU,
            lambda stage, *_: stages.append(stage),
            lambda: "compile" in stages,
        )
    assert stages[-1] == "compile"
