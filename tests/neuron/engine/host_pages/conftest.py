from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.request import LoadSpec

from ...engine_runs import filled
from .engines import CPU, EngineMaker


@pytest.fixture
def make_engine() -> Iterator[EngineMaker]:
    engines: list[Engine] = []

    def make(
        config: dict[str, Any],
        host: DeviceHostMemory | None,
        seed: int = 0,
        page_tokens: int = PAGE_TOKENS,
        **options: Any,
    ) -> Engine:
        spec = LoadSpec(path="", **{"dtype": "float32", "max_num_seqs": 4, **options})
        loaded = build_model(config, spec, CPU, filled(seed))
        if page_tokens != PAGE_TOKENS:
            memory, dtype = loaded.memory, loaded.dtype
            memory = SequenceMemory(loaded.model, memory.num_pages, page_tokens, memory.slots, dtype, CPU)
            loaded = replace(loaded, memory=memory)
        engine = Engine(loaded, spec)
        if host is not None:
            engine.keep_pages(host)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
