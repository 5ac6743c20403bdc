"""Batch-invariant steps: through the GPU's kernels, a sequence gives the same bits whatever shares its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortex.neuron.engine.execution.batch_invariant import batches, cut
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.scheduling.step_plan import RowInputs, RowPlan, StepPlan
from cortex.neuron.kernels.jit import INTERPRETED
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import read_architecture

from ..tiny_models import tiny_delta, tiny_experts, tiny_sizes

PAGE_TOKENS, PAGES_PER_ROW, ROWS = 4, 4, 3
BLOCK = 4
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    **tiny_sizes(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    ),
    "tie_word_embeddings": True,
}
EXPERTS = tiny_experts(num_experts=4, moe_intermediate_size=8)
LATENT = {
    **{"model_type": "youtu", "kv_lora_rank": 16, "q_lora_rank": 12},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "mixture": DENSE | EXPERTS | {"model_type": "qwen3_moe"},
    "latents": DENSE | LATENT,
    "delta net": DENSE
    | {
        "model_type": "qwen3_next",
        **tiny_delta(linear_num_key_heads=1, linear_num_value_heads=2),
        "layer_types": ["linear_attention"],
    },
    "short convolution": DENSE | {"model_type": "lfm2", "full_attn_idxs": []},
    "Mamba": DENSE
    | {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "ME", "mamba_num_heads": 2, "mamba_head_dim": 8},
        **{"ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 4, "moe_intermediate_size": 8},
        **{"moe_shared_expert_intermediate_size": 8, "moe_latent_size": 8},
    },
}
SEQUENCE = (3, 14, 15, 9, 26, 5)
"""Row 0."""
OTHERS = {1: (53, 58, 9), 2: (7, 9, 3, 2)}


class Model:
    """A model with random weights, and empty memory for some rows."""

    def __init__(self, family: str, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        self._decoder = Decoder(read_architecture(FAMILIES[family]), Parameters(device, dtype), 64)
        for binding in self._decoder.parameters.bindings:
            torch.nn.init.normal_(binding.destination, std=0.3)
        num_pages = 1 + ROWS * PAGES_PER_ROW
        SequenceMemory(self._decoder, {None: num_pages}, PAGE_TOKENS, StateSlots(ROWS), dtype, device)
        pages = np.arange(1, num_pages, dtype=np.int32).reshape(ROWS, PAGES_PER_ROW)
        self._pages = np.concatenate((pages, np.zeros((1, PAGES_PER_ROW), np.int32)))  # the last: padding
        self._device = device

    def step(self, *spans: tuple[int, int, int]) -> dict[int, Tensor]:
        """(row, start, end) each → by row, the residual stream after the last layer of its tokens in this step."""
        texts = {0: SEQUENCE, **OTHERS}
        rows = tuple(RowPlan(row, start, RowInputs(end - start, texts[row][start:end])) for row, start, end in spans)
        inputs = StepInputs.of(StepPlan(rows, 0, (), ()), [self._pages], PAGE_TOKENS)
        tokens, table = self._upload(inputs.tokens), self._upload(self._pages)
        blocks = batches(rows, BLOCK, inputs, tokens, [table], self._upload)
        hidden = torch.cat([self._decoder(batch)[:count] for batch, count in blocks])
        parts = hidden.split([row.count for row in rows])
        return dict(zip((row.row for row in rows), parts, strict=True))

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter have the same bits in every row, as on a GPU. With numpy's, they depend on the place
    of a row among the others, on some processors."""

    def multiply(left: Any, right: Any, dtype: Any) -> Any:
        return (left[..., ::-1, None] * right[..., None, ::-1, :]).sum(-2, dtype=dtype)  # a sum of its own, in order

    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", multiply)


@pytest.mark.usefixtures("rows_alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_gives_the_same_bits_alone_in_company_and_in_chunks(
    family: str, device: torch.device, dtype: torch.dtype
) -> None:
    alone = Model(family, device, dtype).step((0, 0, 6))[0]

    in_company = Model(family, device, dtype).step((1, 0, 3), (0, 0, 6))[0]
    assert torch.equal(in_company, alone)

    model = Model(family, device, dtype)
    chunks = [
        model.step((0, 0, 1), (2, 0, 4))[0],
        model.step((2, 3, 4), (0, 1, 4))[0],
        model.step((0, 4, 5))[0],
        model.step((1, 0, 1), (0, 5, 6))[0],
    ]
    assert torch.equal(torch.cat(chunks), alone)


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([1], 4, [[(0, 0, 1, 0)]]),
        ([4], 4, [[(0, 0, 4, 0)]]),
        ([6], 4, [[(0, 0, 4, 0)], [(0, 4, 2, 4)]]),
        ([1, 1, 5], 4, [[(0, 0, 1, 0), (1, 0, 1, 1), (2, 0, 2, 2)], [(2, 2, 3, 4)]]),
        ([2, 1], 1, [[(0, 0, 1, 0)], [(0, 1, 1, 1)], [(1, 0, 1, 2)]]),
    ],
)
def test_step_is_cut_into_blocks(counts: Sequence[int], size: int, expected: list[list[tuple[int, ...]]]) -> None:
    rows = [RowPlan(number, 0, RowInputs(count, None)) for number, count in enumerate(counts)]
    assert cut(rows, size) == expected
