"""Architectures that the `transformers` library runs, on our weights, pages and batches, against the library alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .family_models import VOCAB
from .test_parity import PROMPT_TOKENS, Driver, assert_parity, load
from .transformers_models import CASES, reference_of


@pytest.mark.parametrize(("family", "name"), CASES)
@torch.inference_mode()
def test_every_logit_matches_the_library(family: str, name: str, tmp_path: Path) -> None:
    """Of a prompt that is computed whole, in chunks that do not fit pages, token by token, and with another one."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens, other = (torch.randint(0, VOCAB, (count,), generator=generator) for count in (PROMPT_TOKENS, 40))
    expected = reference(tokens[None]).logits[0]
    (whole,) = Driver(model, 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(whole, expected)
    cut, beside = Driver(model, 2).logits([tokens, other], [[31, 1, 2, 30, *[1] * 11], [1, 38, 1]])
    assert_parity(cut, expected)
    assert_parity(beside, reference(other[None]).logits[0])
