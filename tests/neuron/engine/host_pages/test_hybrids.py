"""A prefix of a model with recurrent layers is usable up to the last position that has its pages and its state."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.tier import HostTier
from cortex.neuron.engine.kv.pages import ROOT, page_digests
from cortex.neuron.engine.step_loop import StepLoop

from ...tiny_models import tiny_delta
from ..test_sleep import DENSE, HYBRID
from .engines import PROMPT, EngineMaker, new_host, respond

MAMBA = {"mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "head_dim": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "delta net": DENSE
    | {"model_type": "qwen3_next", **tiny_delta(), "layer_types": ["linear_attention", "full_attention"]},
    "short convolutions": DENSE | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "Mamba": DENSE | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*", "num_hidden_layers": 3, **MAMBA},
    "states only": DENSE | {"model_type": "lfm2", "full_attn_idxs": []},
}


def tier_of(engine: Engine) -> HostTier:
    loop = engine._loop  # noqa: SLF001 - what it has is taken away
    assert isinstance(loop, StepLoop)
    assert loop.host is not None
    return loop.host


@pytest.mark.parametrize(
    ("lost_pages", "lost_states", "usable"),
    [
        pytest.param([], [], 160, id="all are there"),
        pytest.param([], [4], 96, id="the last state is gone"),
        pytest.param([4], [], 96, id="the last page is gone"),
        pytest.param([3], [4], 96, id="both, at different places"),
        pytest.param([2], [], 0, id="the page before the earlier state is gone"),
        pytest.param([], [2, 4], 0, id="no state is left"),
        pytest.param([0], [], 0, id="the first page is gone"),
    ],
)
def test_prefix_is_usable_where_pages_and_state_exist(
    make_engine: EngineMaker, lost_pages: list[int], lost_states: list[int], usable: int
) -> None:
    host = new_host()
    engine = make_engine(HYBRID, host)
    expected, _ = respond(engine)
    engine.save_pages()
    digests = _digests(engine)
    again = make_engine(HYBRID, host)
    pages, states = tier_of(again)._kinds  # noqa: SLF001
    assert [host.store.has(states, digest) for digest in digests] == [False, False, True, False, True]
    host.store.forget(pages, [digests[index] for index in lost_pages])
    host.store.forget(states, [digests[index] for index in lost_states])
    assert respond(again) == (expected, usable)
    assert again.stats().fetched_tokens == usable
    host.store.check_integrity()


def _digests(engine: Engine) -> list[bytes]:
    return page_digests(ROOT, PROMPT, engine.info.page_tokens)


def test_state_without_its_pages_on_the_device_is_fetched_with_them(make_engine: EngineMaker) -> None:
    """The pages of another conversation with the same beginning are on the device already: only the rest is copied."""
    host = new_host()
    engine = make_engine(HYBRID, host)
    expected, _ = respond(engine)
    engine.save_pages()
    again = make_engine(HYBRID, host)
    respond(again, PROMPT[:100], "beginning")
    fetched = again.stats().fetched_tokens
    assert fetched == 96
    assert respond(again) == (expected, 160)
    assert again.stats().fetched_tokens == 160
