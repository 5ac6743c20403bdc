import pytest
import torch

from cortex.neuron.kernels import decode_attention
from cortex.neuron.kernels.attention import paged_attention, paged_attention_reference
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow

PAGE_TOKENS = 32


def make_batch(decode_lengths, prefills, device):
    """`prefills`: (start, count) of each prefill row. Pages are dealt out at random."""
    lengths = [*decode_lengths, *(start + count for start, count in prefills)]
    max_pages = -(-max(lengths) // PAGE_TOKENS)
    table = torch.randperm(len(lengths) * max_pages).reshape(len(lengths), max_pages).int() + 1
    offsets, rows, tiles = [0], [], []
    for number, (start, count) in enumerate(prefills):
        rows.append(PrefillRow(len(decode_lengths) + number, start, count, len(decode_lengths) + offsets[-1]))
        tiles += [(number, first) for first in range(0, count, PREFILL_TILE)]
        offsets.append(offsets[-1] + count)
    unused = torch.empty(0)
    batch = Batch(
        tokens=unused,
        positions=unused,
        slots=unused,
        rows=torch.arange(len(lengths), device=device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table.to(device),
        num_decodes=len(decode_lengths),
        max_length=max(lengths),
        prefills=tuple(rows),
        prefill_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        prefill_tiles=torch.tensor(tiles, dtype=torch.int32, device=device).reshape(-1, 2),
    )
    return batch, len(lengths) * max_pages + 1, len(decode_lengths) + offsets[-1]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (9, 3, 64), (4, 4, 80), (1, 1, 32)])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("decode_lengths", "prefills"),
    [
        ([1], []),
        ([5, 200, 33, 64], []),
        ([], [(0, 1), (0, 150)]),
        ([70], [(100, 40), (0, 129), (31, 2)]),
    ],
)
def test_paged_attention_matches_its_reference(
    heads, kv_heads, dim, window, decode_lengths, prefills, device, dtype, assert_close, monkeypatch
):
    if device.type == "cpu":
        monkeypatch.setattr(decode_attention, "_num_processors", lambda _: 8)
    batch, num_pages, tokens = make_batch(decode_lengths, prefills, device)
    q = torch.randn(tokens, heads, dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, num_pages, PAGE_TOKENS, kv_heads, dim, device=device, dtype=dtype)
    out = paged_attention(q, keys, values, batch, dim**-0.5, window)
    cpu = [t.cpu() for t in (batch.rows, batch.lengths, batch.page_table)]
    plain = Batch(batch.tokens, batch.positions, batch.slots, *cpu, batch.num_decodes, batch.max_length, batch.prefills)
    reference = paged_attention_reference(
        q.float().cpu(), keys.float().cpu(), values.float().cpu(), plain, dim**-0.5, window
    )
    assert_close(out.cpu(), reference)


@pytest.mark.gpu
def test_decode_attention_is_the_same_every_time(device, dtype):
    """A moving result would be a race between the programs that combine a row."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    batch, num_pages, tokens = make_batch([3000] * 3 + [517], [], device)
    q = torch.randn(tokens, 32, 128, device=device, dtype=dtype)
    keys, values = torch.randn(2, num_pages, PAGE_TOKENS, 8, 128, device=device, dtype=dtype)
    first = paged_attention(q, keys, values, batch, 0.1, None)
    for _ in range(50):
        assert (paged_attention(q, keys, values, batch, 0.1, None) - first).abs().max() < 1e-2
