"""What is in host memory is never used unless it is what was copied, of this model, in this layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor

from cortex.neuron.engine.host_pages.copies import BlockCopies
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.store import BlockKind, HostPages
from cortex.neuron.engine.kv.pages import ROOT, page_digests
from cortex.neuron.engine.memory.plan import PAGE_TOKENS

from ..test_sleep import DENSE, HYBRID
from .engines import PROMPT, EngineMaker, new_host, respond

DIGESTS = page_digests(ROOT, PROMPT, PAGE_TOKENS)


def saved(make_engine: EngineMaker, config: dict[str, Any], host: DeviceHostMemory) -> list[int]:
    engine = make_engine(config, host)
    tokens, _ = respond(engine)
    engine.save_pages()
    return tokens


def kinds_of(host: DeviceHostMemory) -> list[BlockKind]:
    return sorted({kind for kind, _ in host.store._slab_of}, key=lambda kind: kind.part)  # noqa: SLF001


def contents(host: DeviceHostMemory, kind: BlockKind, digest: bytes) -> Tensor:
    found = host.store.checksum(kind, digest)
    assert found is not None
    return host.slabs.rows(*found[0], 1, kind.num_bytes)[0]


@pytest.mark.parametrize(("page", "usable"), [(0, 0), (1, 32), (2, 64), (4, 128)])
def test_flipped_bit_of_a_page_is_found_and_the_page_is_computed_again(
    make_engine: EngineMaker, page: int, usable: int
) -> None:
    host = new_host()
    expected = saved(make_engine, DENSE, host)
    (kind,) = kinds_of(host)
    contents(host, kind, DIGESTS[page])[random.Random(page).randrange(kind.num_bytes)] ^= 1
    again = make_engine(DENSE, host)
    assert respond(again) == (expected, usable)
    assert not host.store.has(kind, DIGESTS[page])
    again.save_pages()
    assert respond(make_engine(DENSE, host)) == (expected, 160), "it was kept again"
    host.store.check_integrity()


def test_flipped_bit_of_a_state_is_found(make_engine: EngineMaker) -> None:
    host = new_host()
    expected = saved(make_engine, HYBRID, host)
    _, states = kinds_of(host)
    contents(host, states, DIGESTS[4])[5] ^= 1
    assert respond(make_engine(HYBRID, host)) == (expected, 96), "the earlier state is intact"


def test_contents_of_pages_decide_the_response(make_engine: EngineMaker) -> None:
    """Else the other tests here would find nothing."""
    host = new_host()
    expected = saved(make_engine, DENSE, host)
    (kind,) = kinds_of(host)
    for digest in DIGESTS:
        contents(host, kind, digest)[:] ^= 0x7F
    trusting = DeviceHostMemory(host.store, host.slabs)
    tokens, cached = respond(make_engine(DENSE, trusting))
    assert cached == 160
    assert tokens != expected


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"seed": 1}, id="weights"),
        pytest.param({"dtype": "bfloat16"}, id="dtype"),
        pytest.param({"deterministic": True}, id="arithmetic"),
        pytest.param({"page_tokens": 16}, id="page size"),
        pytest.param({"rope_theta": 5000.0}, id="config"),
    ],
)
def test_blocks_of_another_model_or_layout_are_never_taken(make_engine: EngineMaker, changes: dict[str, Any]) -> None:
    host = new_host()
    expected = saved(make_engine, DENSE, host)
    options = dict(changes)
    config = DENSE | {name: options.pop(name) for name in ("rope_theta",) if name in options}
    other = make_engine(config, host, **options)
    assert other.info.page_tokens == options.get("page_tokens", PAGE_TOKENS)
    assert respond(other)[1] == 0
    other.save_pages()
    assert respond(make_engine(DENSE, host)) == (expected, 160), "its own are there still, after an unload and a load"
    assert len({kind.model for kind in kinds_of(host)}) == 2


def test_host_memory_that_does_not_help_costs_no_copy_and_one_look_per_prompt(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: list[str] = []

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            work.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    host = new_host(verifies=False)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(100)) for seed in range(4)]
    engine = make_engine(DENSE, host)
    for owner, name in ((BlockCopies, "_run"), (HostPages, "has"), (HostPages, "reserve"), (HostPages, "borrow")):
        counted(owner, name)
    for prompt in prompts:
        respond(engine, prompt)
    assert work == [], "nothing is there"
    engine.save_pages()
    assert work.count("_run") == 1
    work.clear()
    engine.save_pages()
    assert "_run" not in work, "all of it is there"
    work.clear()
    for prompt in prompts:
        respond(engine, prompt)
    assert "_run" not in work, "the device has them"
    work.clear()
    other = make_engine(DENSE, host, seed=1)
    for prompt in prompts:
        respond(other, prompt)
    assert work == ["has"] * len(prompts), "the first page is not there"
