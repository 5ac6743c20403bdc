"""Prefill attention for Hopper, on such a card; elsewhere that it is not chosen, and that it can be compiled."""

from dataclasses import replace

import pytest
import torch
from tests.neuron.kernels.attention.test_paged import PAGE_TOKENS, behind_windows, make_batch
from tests.neuron.kernels.conftest import relative_error

from cortex.neuron.kernels.attention import hopper
from cortex.neuron.kernels.attention.paged import attend_reference
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.private_api.triton import GLUON

from ...failed_probes import fail_probe

ON_HOPPER = pytest.mark.usefixtures("on_hopper")
CUDA = torch.device("cuda")
ROWS = [
    [(0, 1)],
    [(0, 128), (0, 64)],
    [(0, 300), (77, 130), (31, 2), (512, 128)],
    [(1003, 517), (0, 129)],
    [(4000, 200)],
]


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=dtype)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (6, 1, 64), (4, 2, 256)])
@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (None, True), (100, True), (1000, False)])
def test_rows_match_the_reference(
    heads: int, kv_heads: int, dim: int, rows: list[tuple[int, int]], window: int | None, has_sinks: bool
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        batch, num_pages = make_batch([], rows, CUDA)
        pages = noise(2, num_pages + 1, PAGE_TOKENS, kv_heads, dim, dtype=dtype)
        if window is not None and any(start > window + PAGE_TOKENS for start, _ in rows):
            pages[:, num_pages] = torch.nan  # released, and not finite: it is not read
            batch = behind_windows(batch, window, num_pages)
        q = noise(len(batch.positions), heads, dim, dtype=dtype)
        sinks = 2 * torch.randn(heads, device=CUDA) if has_sinks else None
        rules = AttentionRules(dim**-0.5, torch.empty(0), window=window, sinks=sinks)
        out = torch.full_like(q, torch.nan)
        hopper.prefill_attention(q, rules, batch, pages[0], pages[1], out)
        expected = attend_reference(q.float(), rules, batch, *pages.float())
        assert relative_error(out, expected) < 0.006


@pytest.mark.gpu
@ON_HOPPER
def test_tokens_of_no_row_are_left_alone_and_decode_rows_skipped() -> None:
    batch, num_pages = make_batch([5, 40], [(30, 200)], CUDA)
    assert batch.prefill_tiles is not None
    tiles = torch.cat((batch.prefill_tiles, torch.tensor([[0, 256], [0, 384]], dtype=torch.int32, device=CUDA)))
    pages, q = noise(2, num_pages, PAGE_TOKENS, 2, 128), noise(512, 4, 128)
    rules = AttentionRules(0.1, torch.empty(0))
    out = torch.full_like(q, 7.0)
    hopper.prefill_attention(q, rules, replace(batch, prefill_tiles=tiles), pages[0], pages[1], out)
    row = replace(batch.prefills[0], offset=0)
    alone = replace(batch, num_decodes=0, prefills=(row,), _shared={})
    assert relative_error(out[:200], attend_reference(q[:200].float(), rules, alone, *pages.float())) < 0.006
    assert bool((out[200:] == 7.0).all())


def prompt(tokens: int, **changed: object) -> tuple[torch.Tensor, AttentionRules, Batch, torch.Tensor]:
    batch, num_pages = make_batch([], [(0, tokens)], torch.device("cpu"))
    q = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(num_pages, PAGE_TOKENS, 8, 128, dtype=torch.bfloat16, device="meta")
    return q, AttentionRules(1.0, torch.empty(0)), replace(batch, **changed), pages  # type: ignore[arg-type]


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "num_processors", lambda _: 132)
    if not GLUON.is_usable:
        pytest.skip(f"no Gluon: {GLUON.problem or 'Triton is not installed'}")


@pytest.mark.usefixtures("usable")
def test_takes_prompts_that_fill_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper.takes(*prompt(2048))
    assert not hopper.takes(*prompt(128))  # few programs: others divide the keys
    fail_probe(monkeypatch, GLUON)
    assert not hopper.takes(*prompt(2048))


@pytest.mark.usefixtures("usable")
def test_leaves_what_it_has_no_code_for() -> None:
    q, rules, batch, pages = prompt(2048)
    assert not hopper.takes(q, replace(rules, softcap=30.0), batch, pages)
    assert not hopper.takes(q, rules, batch, pages.to(torch.float8_e4m3fn))
    assert not hopper.takes(q.float(), rules, batch, pages.float())
    assert not hopper.takes(q[..., :80], rules, batch, pages[..., :80])
    assert not hopper.takes(*prompt(2048, batch_invariant=True))
    whole = replace(rules, whole_pictures=True)
    assert hopper.takes(q, whole, batch, pages)
    assert not hopper.takes(q, whole, replace(batch, reach=torch.empty(0)), pages)
