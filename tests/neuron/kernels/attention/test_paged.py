import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.attention import prefill
from cortex.neuron.kernels.attention.paged import attention, attention_reference
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow
from cortex.neuron.kernels.jit import INTERPRETED

PAGE_TOKENS = 32


def make_batch(decode_lengths: list[int], prefills: list[tuple[int, int]], device: torch.device) -> tuple[Batch, int]:
    """`prefills`: (start, count) of each prefill row. Pages are assigned at random; page 0 is unused."""
    lengths = [*decode_lengths, *(start + count for start, count in prefills)]
    max_pages = -(-max(lengths) // PAGE_TOKENS)
    table = torch.randperm(len(lengths) * max_pages).reshape(len(lengths), max_pages).int() + 1
    decodes = len(decode_lengths)
    positions = [torch.tensor([length - 1]) for length in decode_lengths]
    positions += [torch.arange(start, start + count) for start, count in prefills]
    slots = [
        table[row, position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS
        for row, position in enumerate(positions)
    ]
    offsets, rows, tiles = [0], [], []
    for number, (start, count) in enumerate(prefills):
        rows.append(PrefillRow(decodes + number, start, count, decodes + offsets[-1]))
        tiles += [(number, first) for first in range(0, count, PREFILL_TILE)]
        offsets.append(offsets[-1] + count)
    batch = Batch(
        tokens=torch.empty(0),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        rows=torch.arange(len(lengths), device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table.to(device),
        num_decodes=decodes,
        max_length=max(lengths),
        prefills=tuple(rows),
        prefill_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=device).reshape(-1, 2),
    )
    return batch, len(lengths) * max_pages + 1


GEOMETRIES = [
    (4, 2, 128, 128, True, False),
    (3, 1, 64, 64, False, False),
    (2, 2, 80, 16, True, True),
    (2, 1, 256, 64, True, False),
    (8, 1, 512, 128, True, True),
]
ROWS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1], []),
    ([5, 200, 65], []),
    ([], [(0, 1), (0, 40)]),
    ([70], [(100, 40), (31, 2)]),
]


@pytest.mark.parametrize(
    (
        "heads",
        "kv_heads",
        "dim",
        "rotated",
        "normed",
        "norms_values",
        "window",
        "has_sinks",
        "decode_lengths",
        "prefills",
    ),
    [
        # Every geometry and all rows, each with and without a window, and with and without sinks.
        (*geometry, None if (number + row) % 2 else 50, number % 2 == 1, *ROWS[row])
        for number, geometry in enumerate(GEOMETRIES)
        for row in range(len(ROWS))
    ]
    + [(*GEOMETRIES[1], None, has_sinks, [], [(0, PREFILL_TILE + 6)]) for has_sinks in (False, True)],
)
def test_attention_and_stored_kv_match_the_reference(
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    normed: bool,
    norms_values: bool,
    window: int | None,
    has_sinks: bool,
    decode_lengths: list[int],
    prefills: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    batch, num_pages = make_batch(decode_lengths, prefills, device)
    tokens = len(batch.positions)
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, kv_heads, dim, device=device, dtype=dtype)
    scales = [torch.randn(dim, device=device, dtype=dtype) if normed else None for _ in range(2)]
    angles = torch.randn(max(batch.lengths), rotated // 2, device=device)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    sinks = 2 * torch.randn(heads, device=device) if has_sinks else None

    def run(function: Callable[..., torch.Tensor], kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        q_scale, k_scale = (None if scale is None else scale.to(kind) for scale in scales)
        half = dim // 2 if norms_values else 0  # some pairs in the middle of a head do not turn
        rules = AttentionRules(dim**-0.5, rope, q_scale, k_scale, 1e-6, window, sinks, norms_values, half)
        q, k, v = projected.to(kind).split([heads, kv_heads, kv_heads], dim=1)
        kept = pages.to(kind, copy=True)
        return function(q, k, v, rules, batch, *kept), kept

    out, kept = run(attention, dtype)
    expected, expected_kept = run(attention_reference, torch.float32)
    assert_close(out, expected)
    assert_close(kept, expected_kept)


@pytest.mark.parametrize("window", [None, 50])
def test_capped_scores_match_the_reference(
    window: int | None, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """The cap is far below the scores, so that one that is forgotten would show."""
    batch, num_pages = make_batch([3, 70], [(0, 9), (33, 40)], device)
    q, k, v = torch.randn(len(batch.positions), 8, 32, device=device, dtype=dtype).split([4, 2, 2], dim=1)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 32, device=device, dtype=dtype)
    rules = AttentionRules(1.0, torch.tensor((1.0, 0.0), device=device).repeat(400, 1), window=window, softcap=1.5)

    def run(function: Callable[..., torch.Tensor], kind: torch.dtype, rules: AttentionRules) -> torch.Tensor:
        return function(q.to(kind), k.to(kind), v.to(kind), rules, batch, *pages.to(kind, copy=True))

    expected = run(attention_reference, torch.float32, rules)
    assert_close(run(attention, dtype, rules), expected)
    assert (run(attention_reference, torch.float32, replace(rules, softcap=None)) - expected).abs().max() > 0.1


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (1200, False)])
def test_few_tokens_after_a_long_prefix_divide_its_keys(
    window: int | None,
    has_sinks: bool,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "num_splits", lambda *_: 3)
    batch, num_pages = make_batch([], [(1600, 21), (0, 5), (600, 2), (1100, 9)], device)
    q, k, v = torch.randn(len(batch.positions), 8, 32, device=device, dtype=dtype).split([4, 2, 2], dim=1)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 32, device=device, dtype=dtype)
    sinks = 2 * torch.randn(4, device=device) if has_sinks else None
    rules = AttentionRules(0.2, torch.randn(1650, 32, device=device), window=window, sinks=sinks)
    expected = attention_reference(q.float(), k.float(), v.float(), rules, batch, *pages.float())
    assert_close(attention(q, k, v, rules, batch, *pages), expected)


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    batch, num_pages = make_batch([5], [(0, 3)], torch.device("cpu"))
    rules = AttentionRules(0.5, torch.tensor((1.0, 0.0)).repeat(8, 1), sinks=torch.tensor([0.3, -1.0]))
    q, k, v = (torch.randn(4, heads, 8) for heads in (2, 1, 1))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 1, 8)
    out = attention_reference(q, k, v, rules, batch, *pages)
    for token, (row, position) in enumerate([(0, 4), (1, 0), (1, 1), (1, 2)]):
        keys, values = (part[batch.page_table[row, 0], : position + 1, 0] for part in pages)
        for head, sink in enumerate((0.3, -1.0)):
            weights = torch.exp(0.5 * keys @ q[token, head])
            expected = weights @ values / (weights.sum() + math.exp(sink))
            torch.testing.assert_close(out[token, head], expected)


def behind_windows(batch: Batch, window: int, page: int) -> Batch:
    """The same step after its rows have released the pages behind their windows: `page` is in their place."""
    table = batch.page_table.clone()
    firsts = [int(length) - 1 for length in batch.lengths[: batch.num_decodes]] + [row.start for row in batch.prefills]
    for row, first in enumerate(firsts):
        table[row, : max(0, first + 1 - window) // PAGE_TOKENS] = page
    assert (table == page).any()
    return replace(batch, page_table=table, _shared={})


@pytest.mark.parametrize("window", [1, 40, 64])
@pytest.mark.parametrize("rows", [([], [(200, 140), (0, 3), (130, 1)]), ([300, 200, 5], []), ([300], [])])
@pytest.mark.parametrize("function", [attention, attention_reference])
def test_pages_behind_the_window_are_not_read(
    function: Callable[..., torch.Tensor],
    rows: tuple[list[int], list[tuple[int, int]]],
    window: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    batch, num_pages = make_batch(*rows, device)
    rules = AttentionRules(0.1, torch.randn(400, 64, device=device), window=window)
    q, k, v = (torch.randn(len(batch.positions), heads, 64, device=device, dtype=dtype) for heads in (2, 1, 1))
    pages = torch.randn(2, num_pages + 1, PAGE_TOKENS, 1, 64, device=device, dtype=dtype)
    pages[:, num_pages] = torch.nan
    expected = function(q, k, v, rules, batch, *pages.clone())
    found = function(q, k, v, rules, behind_windows(batch, window, num_pages), *pages.clone())
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_repeated_decode_attention_gives_the_same_result(device: torch.device, dtype: torch.dtype) -> None:
    """A result that varies would be a race between the programs that combine a row."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    batch, num_pages = make_batch([3000] * 3 + [517], [], device)
    rules = AttentionRules(0.1, torch.randn(3000, 128, device=device))
    q, k, v = (torch.randn(4, heads, 128, device=device, dtype=dtype) for heads in (32, 8, 8))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 8, 128, device=device, dtype=dtype)
    first = attention(q, k, v, rules, batch, *pages)
    for _ in range(50):
        assert (attention(q, k, v, rules, batch, *pages) - first).abs().max() < 1e-2


def eight_bits(pages: torch.Tensor) -> torch.Tensor:
    return pages.clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.gpu
@pytest.mark.parametrize("prefills", [[], [(0, 70), (40, 9)]], ids=["decode", "prefill"])
def test_pages_in_eight_bits_give_what_their_rounded_numbers_give(
    device: torch.device, dtype: torch.dtype, prefills: list[tuple[int, int]], assert_close: AssertClose
) -> None:
    if INTERPRETED:
        pytest.skip("the interpreter has no 8-bit floating-point values")
    batch, num_pages = make_batch([90, 1, 33], prefills, device)
    tokens = len(batch.positions)
    q, k, v = (torch.randn(tokens, heads, 64, device=device, dtype=dtype) * 3 for heads in (8, 2, 2))
    v[0, 0, 0] = 1000  # becomes the largest number that eight bits hold
    rules = AttentionRules(0.125, torch.cat((torch.ones(128, 32), torch.zeros(128, 32)), 1).to(device))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 64, device=device, dtype=dtype)
    kept = eight_bits(pages)
    out = attention(q, k, v, rules, batch, *kept)
    rounded = eight_bits(pages).to(torch.float32)
    small_k, small_v = (eight_bits(part).to(torch.float32) for part in (k, v))
    expected = attention_reference(q.float(), small_k, small_v, rules, batch, *rounded)
    assert_close(out, expected)
    assert_close(kept.to(torch.float32), rounded)


def as_decode_rows(batch: Batch) -> Batch:
    """The tokens of prefill rows as decode rows, several of one sequence after another."""
    counts = torch.tensor([row.count for row in batch.prefills], device=batch.rows.device)
    return replace(
        batch,
        rows=batch.rows.repeat_interleave(counts),
        lengths=(batch.positions + 1).int(),
        num_decodes=len(batch.positions),
        prefills=(),
        prefill_offsets=None,
        prefill_tiles=None,
        shares_rows=True,
        _shared={},
    )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [[(200, 8)], [(70, 4), (0, 3), (31, 2), (130, 1)]])
def test_tokens_of_one_sequence_attend_to_each_other_as_decode_rows(
    rows: list[tuple[int, int]],
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    batch, num_pages = make_batch([], rows, device)
    rules = AttentionRules(0.1, torch.randn(400, 64, device=device), window=window)
    q, k, v = (torch.randn(len(batch.positions), heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 64, device=device, dtype=dtype)
    expected_kept, kept = pages.float(), pages.clone()
    expected = attention_reference(q.float(), k.float(), v.float(), rules, batch, *expected_kept)
    assert_close(attention(q, k, v, rules, as_decode_rows(batch), *kept), expected)
    assert_close(kept, expected_kept)


@pytest.mark.parametrize("window", [None, 50])
def test_pictures_match_the_reference(
    window: int | None, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    """Rotations of other rows than positions, and tokens that see later ones of their picture, across tiles of keys."""
    batch, num_pages = make_batch([3, 70], [(0, 9), (33, PREFILL_TILE + 40)], device)
    tokens = len(batch.positions)
    reach = (batch.positions + 1).int()
    reach[13:100] = 33 + 100 - 11  # the last row begins at token 11
    rope_positions = torch.randint(0, 400, (tokens,), device=device)
    q, k, v = torch.randn(tokens, 8, 32, device=device, dtype=dtype).split([4, 2, 2], dim=1)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 32, device=device, dtype=dtype)
    angles = torch.randn(400, 16, device=device)
    rules = AttentionRules(0.3, torch.cat((angles.cos(), angles.sin()), dim=1), window=window, whole_pictures=True)
    seen = replace(batch, reach=reach, rope=rope_positions)

    def run(function: Callable[..., torch.Tensor], kind: torch.dtype, batch: Batch) -> torch.Tensor:
        return function(q.to(kind), k.to(kind), v.to(kind), rules, batch, *pages.to(kind, copy=True))

    expected = run(attention_reference, torch.float32, seen)
    assert_close(run(attention, dtype, seen), expected)
    for other in (replace(seen, reach=None, _shared={}), replace(seen, rope=None, _shared={})):
        assert (run(attention_reference, torch.float32, other) - expected).abs().max() > 0.1
