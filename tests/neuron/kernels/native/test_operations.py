"""Recordings of operations in C: a replay computes what the operations compute one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cortex.neuron.kernels.attention.native import native_attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.cpu.native import NativeMatrix
from cortex.neuron.kernels.greedy import argmax, argmax_reference
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Prologue, StackedMatrix
from cortex.neuron.kernels.native.library import native_library_or_none
from cortex.neuron.kernels.native.operations import NotRecorded, Recording

HEADS, KV_HEADS, DIM, ROWS, PAGE_TOKENS, PAGES = 4, 2, 32, 5, 8, 20
HIDDEN = HEADS * DIM
VOCAB = 200


@pytest.fixture(autouse=True)
def library() -> None:
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")


def matrix(outputs: int, inputs: int, bits: int = 8) -> NativeMatrix:
    layout = CpuLayout(bits, 16 if bits == 6 else 32, 1 << bits - 1)
    made = NativeMatrix(layout, outputs, inputs, torch.device("cpu"))
    made.put_values(0, torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(bits)) * inputs**-0.5)
    return made


class Layer:
    """A model of one layer, with all that a decode step has: the rows of an embedding, two products of one input in
    different formats, a bias, attention, an activation, a residual stream, a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        kv = KV_HEADS * DIM
        self.embedding = matrix(VOCAB, HIDDEN)
        self.qkv = StackedMatrix([matrix(HIDDEN + kv, HIDDEN, 4), matrix(kv, HIDDEN, 6)])
        self.output, self.gate_up, self.down = (
            matrix(*shape) for shape in ((HIDDEN, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
        )
        self.bias = torch.randn(HIDDEN + 2 * kv).to(dtype)
        angles = torch.randn(PAGES * PAGE_TOKENS, DIM // 2)
        self.rules = AttentionRules(DIM**-0.5, torch.cat((angles.cos(), angles.sin()), 1))
        self.pages = torch.zeros(2, PAGES, PAGE_TOKENS, KV_HEADS, DIM, dtype=dtype)
        self.dtype = dtype

    def __call__(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.embedding.rows(tokens, self.dtype)
        heads = self.qkv.product(hidden, PLAIN, Epilogue(self.bias)).view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = torch.split_with_sizes(heads, [HEADS, KV_HEADS, KV_HEADS], 1)
        mixed = native_attention(q, k, v, self.rules, batch, *self.pages)
        hidden = self.output.product(mixed.flatten(1), PLAIN, Epilogue(residual=hidden))
        hidden = self.down.product(self.gate_up.product(hidden), Prologue(activation="silu"), Epilogue(residual=hidden))
        logits = self.embedding.product(hidden.float())
        return logits, *argmax(logits)


def decode_batch(positions: Tensor, table: Tensor) -> Batch:
    rows = torch.arange(ROWS)
    slots = table[rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    return Batch(
        torch.empty(0), positions, slots, rows, positions.int() + 1, table.int(), ROWS, int(positions.max()) + 1
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_replay_computes_the_rows_that_there_are(
    dtype: torch.dtype, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, table = Layer(dtype), torch.randperm(PAGES).view(ROWS, -1)
    tokens, batch = torch.zeros(ROWS, dtype=torch.int64), decode_batch(torch.zeros(ROWS, dtype=torch.int64), table)
    with torch.inference_mode(), Recording() as recording:
        recorded = layer(tokens, batch)
    assert layer.pages.eq(0).all()  # recorded, not computed
    for _ in range(3):
        new, positions = torch.randint(0, VOCAB, (ROWS,)), torch.randint(0, 4 * PAGE_TOKENS, (ROWS,))
        layer.pages.normal_()
        before = layer.pages.clone()
        expected = layer(new, decode_batch(positions, table))
        written = layer.pages.clone()
        layer.pages.copy_(before)
        tokens.copy_(new)
        for ours, theirs in ((batch.positions, positions), (batch.slots, decode_batch(positions, table).slots)):
            ours.copy_(theirs)
        with torch.inference_mode(), monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", lambda: threads)
            recording.replay(rows)
        for ours, theirs in zip(recorded, expected, strict=True):
            assert torch.equal(ours[:rows], theirs[:rows])
        if rows == ROWS:
            assert torch.equal(layer.pages, written)


@pytest.mark.parametrize(
    "unknown", [lambda x: x.topk(2), lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x @ x.t()]
)
def test_operations_that_are_not_known_are_not_recorded(unknown: Callable[[Tensor], object]) -> None:
    with torch.inference_mode(), pytest.raises(NotRecorded), Recording():
        unknown(torch.randn(4, 4))


def test_operations_that_are_not_known_are_not_run() -> None:
    """Their inputs may be results that a recording has not computed."""
    values = torch.zeros(4)
    with torch.inference_mode(), pytest.raises(NotRecorded), Recording():
        values.add_(1)
    assert values.eq(0).all()


def test_replay_reports_a_token_that_does_not_exist() -> None:
    tokens, embedding = torch.tensor([3]), matrix(VOCAB, HIDDEN)
    with Recording() as recording:
        embedding.rows(tokens, torch.float32)
    recording.replay(1)
    tokens.fill_(VOCAB)
    with pytest.raises(IndexError):
        recording.replay(1)


@pytest.mark.parametrize("vocab", [1, 15, 16, 1000, 49152])
@pytest.mark.parametrize("broken", [None, float("nan"), float("inf"), float("-inf")])
def test_argmax_is_the_first_of_the_highest(vocab: int, broken: float | None) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).mul_(2).round_()  # with ties
    if broken is not None:
        logits[torch.arange(6), torch.randint(0, vocab, (6,))] = broken
    tokens, healthy = argmax(logits)
    expected, expected_healthy = argmax_reference(logits)
    assert healthy.tolist() == expected_healthy.tolist()
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.gather(1, expected[:, None])) or not healthy.all()
    for row, token, is_healthy in zip(logits, tokens.tolist(), healthy.tolist(), strict=True):
        assert not is_healthy or row[:token].lt(row[token]).all()
