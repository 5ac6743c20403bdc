"""Latent attention on paged latents, against expanded attention written out in torch."""

from collections.abc import Callable

import pytest
import torch
from tests.neuron.kernels.attention.test_paged import PAGE_TOKENS, make_batch
from tests.neuron.kernels.conftest import AssertClose

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.latent import decode, prefill
from cortex.neuron.kernels.latent.attention import latent_attention, latent_attention_reference
from cortex.neuron.kernels.latent.heads import MAX_ROWS, product_by_head, product_by_head_reference
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

HOPPER = SharedMemory(227 << 10, copies=2)
GEOMETRIES = [(5, 64, 24, 16, 40, True), (3, 48, 10, 8, 14, False), (20, 128, 16, 32, 16, True)]
"""Heads, latent, plain and rotated dimensions, dimensions of a value, whether rotated pairs are adjacent."""
ROWS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1], []),
    ([5, 200, 65], []),
    ([], [(0, 1), (0, 40)]),
    ([70], [(100, 40), (31, 2)]),
]


class Step:
    """Random inputs of a layer."""

    def __init__(self, geometry: tuple[int, int, int, int, int, bool], batch: Batch, num_pages: int) -> None:
        heads, self.latent, self.plain, self.rope_dims, value_dim, self.interleaved = geometry
        device, tokens = batch.positions.device, len(batch.positions)
        self.batch = batch
        self.q = torch.randn(tokens, heads, self.plain + self.rope_dims, device=device)
        joint = torch.randn(tokens, 7 + self.latent + self.rope_dims, device=device)
        self.latents = joint[:, 7:]
        self.pages = torch.randn(num_pages, PAGE_TOKENS, 1, self.latent + self.rope_dims, device=device)
        self.weight = torch.randn(heads, self.plain + value_dim, self.latent, device=device) * self.latent**-0.5
        self.norm = torch.rand(self.latent, device=device) + 0.5
        angles = torch.randn(int(batch.lengths.max()), self.rope_dims // 2, device=device)
        self.rope = torch.cat((angles.cos(), angles.sin()), dim=1)

    def run(
        self, function: Callable[..., torch.Tensor], kind: torch.dtype, pages: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rules = LatentRules(
            scale=(self.plain + self.rope_dims) ** -0.5,
            rope=self.rope,
            k_scale=self.norm.to(kind),
            eps=1e-6,
            weight=self.weight.to(kind),
            latent=self.latent,
            interleaved=self.interleaved,
        )
        kept = self.pages.to(pages or kind, copy=True)
        latents = self.latents.to(kind)
        return function(self.q.to(kind), latents, rules, self.batch, kept), kept

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x: [..., rope dims] → the same, rotated, its halves apart"""
        cosine, sine = self.rope[position].chunk(2)
        first, second = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def expanded(self) -> torch.Tensor:
        """Attention with keys and values of every head, one token after the other."""
        slots = self.pages.clone().flatten(0, 1)[:, 0]
        batch, outputs = self.batch, []
        rows = [*range(batch.num_decodes), *(row.row for row in batch.prefills for _ in range(row.count))]
        for token, row in enumerate(rows):
            position = int(batch.positions[token])
            latent, key = self.latents[token].split((self.latent, self.rope_dims))
            normed = latent * torch.rsqrt(latent.square().mean() + 1e-6) * self.norm
            slots[batch.slots[token]] = torch.cat((normed, self.rotated(key, position)))
            seen = torch.arange(position + 1, device=slots.device)
            held = slots[batch.page_table[row, seen // PAGE_TOKENS] * PAGE_TOKENS + seen % PAGE_TOKENS]
            made = torch.einsum("hdl,pl->hpd", self.weight, held[:, : self.latent])
            shared = held[:, self.latent :].expand(len(made), -1, -1)
            keys = torch.cat((made[..., : self.plain], shared), dim=-1)
            query = self.q[token]
            query = torch.cat((query[:, : self.plain], self.rotated(query[:, self.plain :], position)), dim=-1)
            scores = torch.einsum("hd,hpd->hp", query, keys) * (self.plain + self.rope_dims) ** -0.5
            outputs.append(torch.einsum("hp,hpv->hv", scores.softmax(-1), made[..., self.plain :]))
        return torch.stack(outputs)


def test_reference_equals_attention_with_expanded_keys_and_values() -> None:
    torch.manual_seed(0)
    for geometry in GEOMETRIES:
        for rows in ROWS:
            step = Step(geometry, *make_batch(*rows, torch.device("cpu")))
            out, _ = step.run(latent_attention_reference, torch.float32)
            torch.testing.assert_close(out, step.expanded(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("geometry", "rows"),
    [(geometry, rows) for geometry in range(2) for rows in ROWS]
    + [(2, ROWS[1]), (0, ([], [(0, PREFILL_TILE + 6)])), (1, ([7] * (MAX_ROWS + 2), []))],
)
def test_attention_and_stored_latents_match_the_reference(
    geometry: int,
    rows: tuple[list[int], list[tuple[int, int]]],
    device: torch.device,
    dtype: torch.dtype,
    assert_close: AssertClose,
) -> None:
    step = Step(GEOMETRIES[geometry], *make_batch(*rows, device))
    out, kept = step.run(latent_attention, dtype)
    expected, expected_kept = step.run(latent_attention_reference, torch.float32)
    assert_close(out, expected)
    assert_close(kept, expected_kept)


@pytest.mark.gpu
def test_pages_of_eight_bits_match_the_reference(
    device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter rounds eight bits otherwise")
    step = Step(GEOMETRIES[0], *make_batch([70, 33], [(40, 30)], device))
    out, _ = step.run(latent_attention, dtype, torch.float8_e4m3fn)
    expected, _ = step.run(latent_attention_reference, dtype, torch.float8_e4m3fn)
    assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [20, 128])
def test_attention_of_published_sizes_matches_the_reference(
    heads: int, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    for rows in (([3000], []), ([900, 17, 2100] * 12, [(700, 150), (0, 300)])):
        step = Step((heads, 512, 192, 64, 256, True), *make_batch(*rows, device))
        out, kept = step.run(latent_attention, dtype)
        expected, expected_kept = step.run(latent_attention_reference, torch.float32)
        assert_close(out, expected)
        assert_close(kept, expected_kept)


@pytest.mark.parametrize("rows", [1, 3, 40, MAX_ROWS + 1])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_product_by_head_matches_the_reference(
    rows: int, is_transposed: bool, device: torch.device, dtype: torch.dtype, assert_close: AssertClose
) -> None:
    weight = torch.randn(3, 40, 200, device=device, dtype=dtype)
    weight = weight if not is_transposed else weight.transpose(1, 2)
    x = torch.randn(rows, 3, weight.shape[2] + 8, device=device, dtype=dtype)
    out = torch.full((rows, 3, weight.shape[1] + 16), 7.0, device=device, dtype=dtype)
    product_by_head(x, weight, out)
    assert_close(out[..., : weight.shape[1]], product_by_head_reference(x.float(), weight.float()))
    assert (out[..., weight.shape[1] :] == 7.0).all()


@pytest.mark.parametrize(("shared", "tile"), [(SMALLEST, 16), (HOPPER, 64)])
def test_tiles_of_decode_fit_shared_memory(shared: SharedMemory, tile: int) -> None:
    assert decode.fitting_tile(32, 576 * 2, shared) == tile


@pytest.mark.parametrize(("shared", "tiles"), [(SMALLEST, (32, 16, 4)), (HOPPER, (64, 32, 8))])
def test_tiles_of_prefill_fit_shared_memory(shared: SharedMemory, tiles: tuple[int, int, int]) -> None:
    assert prefill.fitting_tiles(576 * 2, shared) == tiles
