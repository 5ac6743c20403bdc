"""A model that is larger than all of its devices: each rank has a part of its weights in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec, StageSpec

from ...engine_runs import responses
from ...named_weights import named_weights
from ...rank_threads import RankThreads
from ...tiny_models import tiny_experts, tiny_sizes, write_checkpoint

GENERAL: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_hidden_layers": 12}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixture": {
        **{"model_type": "qwen3_moe", **tiny_sizes()},
        **tiny_experts(num_experts=16, moe_intermediate_size=32),
        **GENERAL,
    },
    "dense": {"model_type": "qwen3", **tiny_sizes(intermediate_size=192), **GENERAL},
}
STAGES = (StageSpec(0, 6), StageSpec(6, 6))
PROMPTS = ([5, 17, 3, 40, 22, 9, 61], [9, 8, 7] * 24)


@pytest.mark.parametrize("stages", [(), STAGES], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_with_weights_in_host_memory_generate_the_tokens_of_one_device(
    name: str, stages: tuple[StageSpec, ...], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "model", CONFIGS[name], named_weights(CONFIGS[name]))
    spec = LoadSpec(str(path), dtype="float32", max_num_seqs=2, speculation="off", context_tokens=128)
    whole = Engine.load(spec, "cpu", lambda *_: None, lambda: False)
    expected, weight_bytes, kv_bytes = responses(whole, PROMPTS, 4), whole.info.weight_bytes, whole.info.kv_bytes
    whole.close()
    memory_bytes = (weight_bytes * 13 // 20 + kv_bytes // 4) // 2
    limited = tuple(replace(stage, memory_bytes=memory_bytes) for stage in stages)
    part = replace(spec, memory_bytes=memory_bytes, host_weight_bytes=weight_bytes, stages=limited)
    ranks = RankThreads([part, part], tmp_path)
    try:
        assert responses(ranks.leader, PROMPTS, 4) == expected
        hosted = [engine.info.host_weight_bytes for engine in (ranks.leader, ranks.follower)]
        assert all(hosted)
        assert not ranks.errors
    finally:
        ranks.close()
