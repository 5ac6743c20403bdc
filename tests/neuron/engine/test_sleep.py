"""Sleep frees memory, wake restores the same model, and a failed wake changes nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import DamagedError, LoadError, RequestError, SleepError
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.memory.device import DeviceMemory
from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.engine.memory.host_weights import HostBuffer, HostWeights
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.scheduling.scheduler import Scheduler

from ..engine_runs import filled, response_to
from ..tiny_models import tiny_delta, tiny_experts, tiny_sizes

DENSE: dict[str, Any] = {
    "model_type": "llama",
    **tiny_sizes(vocab_size=90, hidden_size=32, intermediate_size=48),
    "tie_word_embeddings": True,
}
HYBRID: dict[str, Any] = DENSE | {
    "model_type": "qwen3_5_text",
    **tiny_delta(linear_key_head_dim=8, linear_value_head_dim=8),
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 2,
}
MIXTURE: dict[str, Any] = DENSE | {
    "model_type": "qwen3_moe",
    **tiny_experts(num_experts=4, moe_intermediate_size=16),
    "head_dim": 8,
}
LATENT: dict[str, Any] = DENSE | {
    **{"model_type": "youtu", "kv_lora_rank": 16, "q_lora_rank": 12},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
PROMPT = tuple(range(5, 75))
CPU = torch.device("cpu")
EngineMaker = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    engines: list[Engine] = []

    def make(config: dict[str, Any] = DENSE, *, moves: bool = False, device: torch.device = CPU) -> Engine:
        """`moves`: the weights leave their place, as they do on a GPU."""
        spec = LoadSpec(path="", dtype="float32" if device is CPU else "auto", max_num_seqs=4)
        engine = Engine(build_model(config, spec, device, filled(0)), spec, moves_weights=moves or None)
        engine.warm_up()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def respond(engine: Engine) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt came from the cache."""
    return response_to(engine, EngineRequest("r", PROMPT, 10, SamplingParams(temperature=0.0)))


def wake(engine: Engine) -> list[tuple[str, int, int]]:
    stages: list[tuple[str, int, int]] = []
    engine.wake(lambda *stage: stages.append(stage))
    return stages


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("config", [DENSE, HYBRID, MIXTURE, LATENT], ids=["dense", "hybrid", "mixture", "latents"])
def test_woken_model_responds_as_before_with_an_empty_cache(
    make_engine: EngineMaker, config: dict[str, Any], moves: bool
) -> None:
    engine = make_engine(config, moves=moves)
    before, _ = respond(engine)
    assert respond(engine)[1] > 0, "a prompt that was seen is cached"
    for _ in range(3):
        assert engine.sleep() >= engine.info.weight_bytes
        assert [stage for stage, _, _ in wake(engine)] == ["place", "warm"]
        assert respond(engine) == (before, 0)


def num_alive(*kinds: type) -> int:
    gc.collect()
    return sum(isinstance(found, kinds) for found in gc.get_objects())


def test_sleeping_model_holds_no_memory_for_sequences(make_engine: EngineMaker) -> None:
    num_before = num_alive(Runner, Scheduler)
    engine = make_engine(HYBRID)
    assert num_alive(Runner, Scheduler) == num_before + 2
    layers = [*engine.model.attentions, *engine.model.recurrent_layers]
    held = [weakref.ref(layer.cache.keys) for layer in engine.model.attentions]
    held += [weakref.ref(layer.state[-1]) for layer in engine.model.recurrent_layers]
    engine.sleep()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
    assert num_alive(Runner, Scheduler) == num_before
    assert not any(hasattr(layer, "cache") or hasattr(layer, "state") for layer in layers)


def test_moved_weights_free_device_memory_and_return_to_every_view(make_engine: EngineMaker) -> None:
    engine = make_engine(moves=True)
    model = engine.model
    storages = model.storages()
    rows = model.head.matrix.tensors[0][3:5]
    expected = rows.clone()
    assert model.head.matrix is model.embedding.matrix, "tied"
    engine.sleep()
    assert sum(storage.nbytes() for storage in storages) == 0
    wake(engine)
    assert torch.equal(rows, expected)
    assert rows.data_ptr() == model.embedding.matrix.tensors[0][3:5].data_ptr()


def test_sleep_and_wake_are_idempotent(make_engine: EngineMaker) -> None:
    engine = make_engine(moves=True)
    assert engine.sleep() == engine.sleep()
    wake(engine)
    assert wake(engine) == []


def test_busy_model_does_not_sleep_and_sleeping_model_rejects_requests(make_engine: EngineMaker) -> None:
    engine = make_engine()
    request = EngineRequest("r", PROMPT, 10, SamplingParams(temperature=0.0))
    engine.submit(request)
    with pytest.raises(SleepError):
        engine.sleep()
    while engine.has_work:
        engine.step()
    engine.sleep()
    assert not engine.has_work
    with pytest.raises(RequestError, match="asleep"):
        engine.submit(request)


def test_counters_continue_over_sleep_without_the_self_test(make_engine: EngineMaker) -> None:
    engine = make_engine()
    assert engine.stats().steps == 0
    respond(engine)
    before = engine.stats()
    engine.sleep()
    asleep = engine.stats()
    assert (asleep.completion_tokens, asleep.num_pages, asleep.cached_pages) == (before.completion_tokens, 0, 0)
    wake(engine)
    assert (engine.stats().steps, engine.stats().num_pages) == (before.steps, before.num_pages)


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("place", "name"), [(SequenceMemory, "allocate"), (Runner, "__init__"), (Runner, "launch")])
def test_wake_that_runs_out_of_memory_leaves_the_model_asleep(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    engine = make_engine(HYBRID, moves=True)
    expected, _ = respond(engine)
    storages = engine.model.storages()
    engine.sleep()
    with monkeypatch.context() as failing:
        failing.setattr(place, name, no_memory)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                wake(engine)
            assert sum(storage.nbytes() for storage in storages) == 0
            assert not any(hasattr(layer, "cache") for layer in engine.model.attentions)
            assert not engine.has_work
    wake(engine)
    assert respond(engine) == (expected, 0)


def test_wake_that_runs_out_of_memory_among_the_weights_frees_them(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(moves=True)
    expected, _ = respond(engine)
    storages = engine.model.storages()
    engine.sleep()
    resize = torch.UntypedStorage.resize_
    num_filled = 0

    def failing(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        nonlocal num_filled
        num_filled += num_bytes > 0
        return no_memory() if num_filled == len(storages) and num_bytes else resize(storage, num_bytes)

    with monkeypatch.context() as out_of_memory:
        out_of_memory.setattr(torch.UntypedStorage, "resize_", failing)
        with pytest.raises(torch.OutOfMemoryError):
            wake(engine)
    assert num_filled == len(storages)
    assert sum(storage.nbytes() for storage in storages) == 0
    wake(engine)
    assert respond(engine) == (expected, 0)


def test_wake_without_room_on_the_device_changes_nothing(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.sleep()
    monkeypatch.setattr("cortex.neuron.engine.sleep.device_memory", lambda *_: DeviceMemory(1 << 30, 1000, 0))
    with pytest.raises(LoadError, match="can be used; unload something"):
        wake(engine)
    monkeypatch.undo()
    wake(engine)


def test_sleep_without_room_on_the_host_leaves_the_model_awake(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(moves=True)
    expected, _ = respond(engine)
    monkeypatch.setattr(
        "cortex.neuron.engine.memory.host_weights.device_memory", lambda _: DeviceMemory(1 << 30, 1000, 0)
    )
    with pytest.raises(SleepError, match=r"[KMG]iB of host memory, but"):
        engine.sleep()
    assert respond(engine)[0] == expected


def test_wake_rejects_weights_that_changed_in_host_memory(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacate = HostWeights.vacate

    def corrupting(weights: HostWeights) -> None:
        weights.buffer.bytes[100] += 1
        vacate(weights)

    monkeypatch.setattr(HostWeights, "vacate", corrupting)
    engine = make_engine(moves=True)
    engine.sleep()
    with pytest.raises(DamagedError, match="weights changed while the model was asleep"):
        wake(engine)


def test_wake_rejects_a_model_that_responds_differently(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.sleep()
    engine.model.embedding.matrix.tensors[0].normal_()
    with pytest.raises(DamagedError, match="responds differently"):
        wake(engine)


def test_sleeping_model_can_be_closed(make_engine: EngineMaker) -> None:
    engine = make_engine(moves=True)
    memory = weakref.ref(engine.model)
    engine.sleep()
    engine.close()
    gc.collect()
    assert memory() is None
    engine.close = lambda: None  # type: ignore[method-assign]  # it is dead


def test_storages_of_odd_sizes_are_restored_exactly() -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (1, 7, 8, 513, 4096)]
    expected = [tensor.clone() for tensor in tensors]
    weights = HostWeights([tensor.untyped_storage() for tensor in tensors])
    weights.vacate()
    weights.restore()
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def test_released_host_memory_is_free_at_once() -> None:
    before = anonymous_bytes()
    memory = HostBuffer(256 << 20, pinned=False)
    memory.bytes.fill_(1)
    assert anonymous_bytes() - before > 200 << 20
    memory.release()
    assert anonymous_bytes() - before < 64 << 20


class Driver:
    """Takes the place of the driver that locks memory for a GPU."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 0
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the driver's name
        del self.locked[address]
        return 0


def test_pinned_memory_is_locked_until_released(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = HostBuffer(10_000, pinned=True)
    assert driver.locked == {memory.bytes.data_ptr(): 10_000}
    memory.release()
    memory.release()
    assert driver.locked == {}


def test_driver_that_cannot_lock_memory_raises_sleep_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(error=2))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # a launch, which needs a GPU
    with pytest.raises(SleepError, match="error 2"):
        HostBuffer(10_000, pinned=True)


@pytest.mark.gpu
def test_gpu_memory_is_freed_and_responses_stay_the_same(make_engine: EngineMaker) -> None:
    device = torch.device("cuda")
    config = DENSE | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32_000,
    }
    empty = torch.cuda.memory_reserved()
    engine = make_engine(config, device=device)
    expected, _ = respond(engine)
    awake = torch.cuda.memory_reserved()
    for _ in range(5):
        engine.sleep()
        assert torch.cuda.memory_reserved() - empty < 160 << 20, "but for the libraries' own buffers"
        wake(engine)
        assert torch.cuda.memory_reserved() <= awake + (64 << 20)
        assert respond(engine) == (expected, 0)
