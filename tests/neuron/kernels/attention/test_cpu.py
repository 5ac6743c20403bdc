"""Attention of decode rows on a CPU, without kernels of Triton."""

from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.attention.test_paged import PAGE_TOKENS, as_decode_rows, behind_windows, make_batch

from cortex.neuron.kernels.attention import native
from cortex.neuron.kernels.attention.native import DTYPES
from cortex.neuron.kernels.attention.one_row import one_row_attention
from cortex.neuron.kernels.attention.paged import attention_reference
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.native.library import native_library_or_none


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated", "normed"), [(9, 3, 64, 64, False), (2, 2, 80, 16, True)]
)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("length", [1, 32, 33, 200])
@pytest.mark.parametrize("are_adjacent", [True, False], ids=["adjacent", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_one_row_on_a_cpu_matches_the_reference(
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    normed: bool,
    window: int | None,
    length: int,
    are_adjacent: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    batch, num_pages = make_batch([length], [], torch.device("cpu"))
    if are_adjacent:
        batch.page_table.copy_(batch.page_table.sort().values)
        batch.slots.fill_(
            int(batch.page_table[0, (length - 1) // PAGE_TOKENS]) * PAGE_TOKENS + (length - 1) % PAGE_TOKENS
        )
    q, k, v = torch.randn(1, heads + 2 * kv_heads, dim).to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, kv_heads, dim).to(dtype)
    q_scale, k_scale = (torch.randn(dim) if normed else None for _ in range(2))
    angles = torch.randn(length, rotated // 2)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    rules = AttentionRules(dim**-0.5, rope, q_scale, k_scale, 1e-6, window, None, normed, dim // 2 if normed else 0)
    kept, expected_kept = pages.clone(), pages.float()
    out = one_row_attention(q, k, v, rules, batch, *kept)
    expected = attention_reference(q.float(), k.float(), v.float(), rules, batch, *expected_kept)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (out.float() - expected).norm() / expected.norm() < limit
    assert (kept.float() - expected_kept).norm() / expected_kept.norm() < limit


@pytest.mark.parametrize("window", [1, 40, 64])
def test_attention_of_one_row_reads_no_pages_behind_the_window(window: int) -> None:
    batch, num_pages = make_batch([300], [], torch.device("cpu"))
    rules = AttentionRules(0.1, torch.randn(400, 64), window=window)
    q, k, v = (torch.randn(1, heads, 64) for heads in (4, 2, 2))
    pages = torch.randn(2, num_pages + 1, PAGE_TOKENS, 2, 64)
    pages[:, num_pages] = torch.nan
    expected = one_row_attention(q, k, v, rules, batch, *pages.clone())
    found = one_row_attention(q, k, v, rules, behind_windows(batch, window, num_pages), *pages.clone())
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated", "normed"),
    [(9, 3, 64, 64, False), (2, 2, 80, 16, True), (4, 1, 24, 24, True)],
)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("lengths", [[1], [32, 300], [33, 1, 64, 7]])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_decode_rows_in_c_matches_the_reference(
    heads: int,
    kv_heads: int,
    dim: int,
    rotated: int,
    normed: bool,
    window: int | None,
    lengths: list[int],
    threads: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    batch, num_pages = make_batch(lengths, [], torch.device("cpu"))
    batch = replace(batch, max_length=1 << 17)  # long enough for all threads
    projected = torch.randn(len(lengths), heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    pages = torch.randn(2, num_pages, PAGE_TOKENS, kv_heads, dim).to(dtype)
    q_scale, k_scale = (torch.randn(dim) if normed else None for _ in range(2))
    angles = torch.randn(max(lengths), rotated // 2)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    sinks = torch.randn(heads) if kv_heads > 1 else None
    half = dim // 2 if normed else 0
    rules = AttentionRules(dim**-0.5, rope, q_scale, k_scale, 1e-6, window, sinks, normed, half)
    kept, expected_kept = pages.clone(), pages.float()
    out = native.native_attention(q, k, v, rules, batch, *kept)
    expected = attention_reference(q.float(), k.float(), v.float(), rules, batch, *expected_kept)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (out.float() - expected).norm() / expected.norm() < limit
    assert (kept.float() - expected_kept).norm() / expected_kept.norm() < limit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 20])
def test_tokens_of_one_sequence_attend_to_each_other_in_c(
    window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    batch, num_pages = make_batch([], [(70, 8), (0, 3), (31, 2), (130, 1), (250, 16)], torch.device("cpu"))
    rules = AttentionRules(0.1, torch.randn(400, 64), window=window)
    q, k, v = (torch.randn(len(batch.positions), heads, 64) for heads in (4, 2, 2))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 64)
    kept, expected_kept = pages.clone(), pages.clone()
    expected = attention_reference(q, k, v, rules, batch, *expected_kept)
    out = native.native_attention(q, k, v, rules, as_decode_rows(batch), *kept)
    assert (out - expected).norm() / expected.norm() < 1e-5
    assert torch.allclose(kept, expected_kept, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_those_that_are_computed_with_it(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens are right if and only if they are the tokens of steps without drafts."""
    if native_library_or_none() is None:
        pytest.skip("nothing can be compiled on this host")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.manual_seed(0)
    count = 16
    batch, num_pages = make_batch([], [(120, count)], torch.device("cpu"))  # from one chunk into the next
    batch = replace(batch, max_length=1 << 17)  # long enough for both threads
    batch = as_decode_rows(batch)
    rules = AttentionRules(0.1, torch.randn(400, 64), window=window, sinks=torch.randn(6))
    q, k, v = (torch.randn(count, heads, 64).to(dtype) for heads in (6, 2, 2))
    pages = torch.randn(2, num_pages, PAGE_TOKENS, 2, 64).to(dtype)
    for width in (1, 3, 5, 8, count):
        kept = pages.clone()
        parts = []
        for first in range(0, count, width):
            some = slice(first, first + width)
            part = replace(
                batch,
                positions=batch.positions[some],
                slots=batch.slots[some],
                rows=batch.rows[some],
                lengths=batch.lengths[some],
                num_decodes=len(batch.rows[some]),
                _shared={},
            )
            parts.append(native.native_attention(q[some], k[some], v[some], rules, part, *kept))
        if width == 1:
            expected, expected_kept = torch.cat(parts), kept
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(kept, expected_kept)
