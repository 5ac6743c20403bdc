"""Pages and states that left the device come back bit by bit, and responses are the same with and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cortex.neuron.engine import engine as engines
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, consecutive
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.fingerprint import computed_by
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import BlockPlace, HostPages
from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.step_loop import StepLoop

from ..test_sleep import DENSE, HYBRID, LATENT, wake
from .engines import CPU, PROMPT, EngineMaker, new_host, respond
from .late_copies import LateOutward
from .test_hybrids import HYBRIDS

WINDOWED: dict[str, Any] = DENSE | {
    **{"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 48, "sliding_window_pattern": 2},
    **{"num_hidden_layers": 4, "query_pre_attn_scalar": 16},
}
ROOMY: dict[str, Any] = DENSE | {"max_position_embeddings": 512, "head_dim": 64}
"""Its device holds ten prompts and more, in pages of 64 kB."""
FAMILIES = {"dense": DENSE, "hybrid": HYBRID, "latents": LATENT, "windows": WINDOWED} | HYBRIDS


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_survives_sleep_and_reload_and_continues_with_the_same_tokens(
    make_engine: EngineMaker, family: str
) -> None:
    config, host = FAMILIES[family], new_host()
    plain = make_engine(config, None)
    expected, _ = respond(plain)
    in_pages = respond(plain)[1] // 32 * 32
    assert in_pages >= 96
    engine = make_engine(config, host)
    assert respond(engine) == (expected, 0)
    engine.sleep()
    assert host.store.num_bytes > 0
    wake(engine)
    assert respond(engine) == (expected, in_pages)
    assert engine.stats().fetched_tokens == in_pages
    longer = (*PROMPT, *expected, 9, 8, 7)
    expected_next = respond(plain, longer)[0]
    engine.save_pages()
    again = make_engine(config, host)
    tokens, cached = respond(again, longer)
    assert tokens == expected_next
    assert cached >= in_pages
    host.store.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_stays_of_a_request_that_is_not_kept(make_engine: EngineMaker, family: str) -> None:
    host, measured = new_host(), tuple(reversed(PROMPT))
    plain, engine = make_engine(FAMILIES[family], None), make_engine(FAMILIES[family], host)
    expected, longer = respond(plain, measured)[0], respond(plain, measured, max_tokens=24)[0]
    assert respond(engine, measured, uses_prefix_cache=False) == (expected, 0)
    assert engine.stats().cached_pages == 0
    conversation, _ = respond(engine)
    in_cache = respond(engine)[1]
    cached_pages = engine.stats().cached_pages
    for _ in range(2):
        assert respond(engine, measured, max_tokens=24, uses_prefix_cache=False) == (longer, 0)
    assert engine.stats().cached_pages == cached_pages
    tokens, cached = respond(engine)
    assert tokens == conversation
    assert cached >= in_cache >= 96
    engine.save_pages()
    again = make_engine(FAMILIES[family], host)
    assert respond(again, measured) == (expected, 0)
    assert respond(again)[1] >= 96


@pytest.mark.parametrize("family", FAMILIES)
def test_tenants_share_neither_pages_nor_states_on_the_device_or_in_host_memory(
    make_engine: EngineMaker, family: str
) -> None:
    host, tenants = new_host(), (b"", b"of one tenant...", b"of another one..")
    engine = make_engine(FAMILIES[family], host)
    expected, _ = respond(engine, tenant=tenants[0])
    for tenant in tenants[1:]:
        assert respond(engine, tenant=tenant) == (expected, 0), "the device has it of others"
    assert all(respond(engine, tenant=tenant)[1] >= 96 for tenant in tenants)
    engine.save_pages()
    again = make_engine(FAMILIES[family], host)
    assert respond(again, tenant=b"of a third one..") == (expected, 0), "host memory has it of others"
    for tenant in tenants:
        tokens, cached = respond(again, tenant=tenant)
        assert tokens == expected
        assert cached >= 96
    host.store.check_integrity()


def test_pages_of_other_prompts_are_never_taken(make_engine: EngineMaker) -> None:
    host = new_host()
    engine = make_engine(DENSE, host)
    respond(engine)
    engine.save_pages()
    same = make_engine(DENSE, host)
    assert respond(same, (PROMPT[0] + 1, *PROMPT[1:]))[1] == 0
    assert respond(same, (*PROMPT[:64], 1, *PROMPT[65:]))[1] == 64


def test_one_changed_byte_of_the_weights_gives_another_fingerprint(make_engine: EngineMaker) -> None:
    host = new_host()
    engine, changed = make_engine(DENSE, host), make_engine(DENSE, host)
    respond(engine)
    engine.save_pages()
    storage = changed.model.storages()[0]
    octets = torch.empty(0, dtype=torch.uint8).set_(storage)
    octets[len(octets) // 2] ^= 1
    assert respond(changed)[1] == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_gpus_of_different_kinds_share_blocks_unless_the_model_is_deterministic(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    found = set()
    for name in ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found.add(computed_by(torch.device("cuda"), deterministic=deterministic))
    assert len(found) == (2 if deterministic else 1)


def test_load_with_another_context_finds_the_pages(make_engine: EngineMaker) -> None:
    host = new_host()
    engine = make_engine(DENSE, host)
    expected, _ = respond(engine)
    engine.save_pages()
    assert respond(make_engine(DENSE, host, context_tokens=200)) == (expected, 160)


def test_rate_is_that_of_the_copy_and_not_of_the_step_after_it(make_engine: EngineMaker) -> None:
    host = new_host()
    engine = make_engine(DENSE, host)
    respond(engine)
    engine.save_pages()
    times = iter([10.0, 10.5])  # a third look at the clock would raise
    host.rate.clock = lambda: next(times)
    respond(make_engine(DENSE, host))
    kind, _ = next(iter(host.store._slab_of))  # noqa: SLF001
    assert host.rate.bytes_per_s == 5 * kind.num_bytes / 0.5


def test_pages_under_pressure_are_copied_before_they_are_overwritten(make_engine: EngineMaker) -> None:
    """As on a GPU: the pool holds five prompts, eight take turns."""
    host = new_host()
    options = {"context_tokens": 256}
    engine = make_engine(DENSE, host, **options)
    loop = engine._loop  # noqa: SLF001 - a CPU copies only before a sleep
    assert isinstance(loop, StepLoop)
    assert loop.host is not None
    loop.host._copies_ahead = True  # noqa: SLF001
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(200)) for seed in range(8)]
    plain = make_engine(DENSE, None, **options)
    expected = [respond(plain, prompt)[0] for prompt in prompts]
    for _ in range(3):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert respond(engine, prompt)[0] == tokens
    assert engine.stats().fetched_tokens > 0
    host.store.check_integrity()


def test_whole_latest_prompt_is_kept_if_slabs_do_not_fill_the_budget(make_engine: EngineMaker) -> None:
    host = new_host()
    engine = make_engine(ROOMY, host)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(170)) for seed in range(12)]
    for prompt in prompts:
        respond(engine, prompt)
    assert engine.tier is not None
    (kind,) = engine.tier._kinds  # noqa: SLF001
    host.store.limit(50 * kind.num_bytes)  # 16 slabs of 3 blocks
    engine.save_pages()
    assert host.store.num_blocks(kind) >= 45
    again = make_engine(ROOMY, host)
    assert [respond(again, prompt)[1] for prompt in prompts[-3:]] == [160] * 3


def test_step_that_isolates_requests_overwrites_pages_only_when_these_are_in_host_memory(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BlockCopies", LateOutward)
    host, options = new_host(), dict[str, Any](context_tokens=256)
    engine, plain = make_engine(DENSE, host, **options), make_engine(DENSE, None, **options)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(200)) for seed in range(8)]
    for prompt in prompts:
        respond(engine, prompt)
    assert engine.tier is not None
    engine.tier._copies_ahead = True  # noqa: SLF001 - a CPU copies only before a sleep
    engine.submit(EngineRequest("r", PROMPT, 4, SamplingParams(temperature=0.0)))
    while not any(output.tokens for output in engine.step()):
        pass

    def failing(*_: Any) -> None:
        raise OverflowError

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "launch", failing)
        with pytest.raises(OverflowError):
            engine.step()
    assert engine.tier._outgoing is not None  # noqa: SLF001
    assert engine.isolate()
    while engine.has_work:
        engine.step()
    engine.save_pages()
    again = make_engine(DENSE, host, **options)
    assert [respond(again, prompt)[0] for prompt in prompts] == [respond(plain, prompt)[0] for prompt in prompts]
    assert again.stats().fetched_tokens > 0


def test_copies_are_bit_equal_in_any_order_of_places() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(4, 9, 3, 5).bfloat16(), torch.randn(2, 9, 7)]
    before = [tensor.clone() for tensor in tensors]
    blocks, slabs = BlockTensors(tensors), HostSlabs(CPU)
    assert blocks.num_bytes == 4 * 15 * 2 + 2 * 7 * 4
    assert slabs.allocate(0, 4 * blocks.num_bytes)
    assert slabs.allocate(1, 2 * blocks.num_bytes)
    places = [BlockPlace(0, 1), BlockPlace(0, 2), BlockPlace(1, 1), BlockPlace(0, 0), BlockPlace(1, 0)]
    assert consecutive(places) == [(0, 2), (2, 1), (3, 1), (4, 1)]
    copies, ids = BlockCopies(slabs, CPU), [8, 1, 5, 2, 3]
    assert copies.to_host(blocks, ids, places).is_complete
    for tensor in tensors:
        tensor.zero_()
    copies.to_device(blocks, ids, places).wait()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[:, ids], old[:, ids])
        assert not tensor[:, [0, 4, 6, 7]].any()


def test_host_that_runs_short_gets_its_memory_back_and_gives_none() -> None:
    free = [1 << 30]
    slabs = HostSlabs(CPU, lambda: HostMemory(1 << 30, free[0]))
    host = DeviceHostMemory(HostPages(slabs, 1 << 20), slabs)
    assert slabs.allocate(7, 1000)
    slabs.free(7)
    free[0] = 1 << 20
    assert not slabs.allocate(7, 1000)
    assert slabs.num_missing_bytes() > 0
    host.yield_to_host()
    assert host.store.num_bytes == 0
