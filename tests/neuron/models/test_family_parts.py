"""Every family in stages, and asleep: its parts compute what the whole model does."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.memory.host_weights import HostWeights
from cortex.neuron.engine.request import LoadSpec, RankSpec, StageSpec
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.parallel import SingleRank
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder

from .driver import CPU, Driver
from .family_models import TABLE
from .tiny_family import VOCAB

SPEC = LoadSpec("", dtype="float32", context_tokens=128, max_num_seqs=4, speculation="off", vision="off")
TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0))
CHUNKS = [[21, 1, 18]]


class AgreedAlready(SingleRank):
    """A group of ranks that all have the memory of this one."""

    num_bytes = 0

    def smallest(self, counts: Sequence[int]) -> list[int]:
        return list(counts)


class InStages(Decoder):
    """Two stages of a model, one after the other, as their ranks run them."""

    def __init__(self, first: Decoder, second: Decoder) -> None:
        self._first, self._second = first, second

    def logits(self, hidden: Tensor) -> Tensor:
        return self._first.logits(hidden)

    def __call__(self, batch: Batch) -> Tensor:
        return self._second.through_layers(self._first(batch), batch)


def fill(parameters: Parameters) -> None:
    """The weights of a tensor follow from its name, so that stages get those of the whole model."""
    for binding in parameters.bindings:
        generator = torch.Generator().manual_seed(zlib.crc32(binding.source.encode()))
        view = binding.destination
        if view.dim() == 1:
            view.uniform_(0.4, 1.4, generator=generator)
        else:
            view.normal_(0.0, 0.15, generator=generator)


def stages_of(config: dict[str, object], num_layers: int) -> InStages:
    """Cut after the first layer, or where the first layer that later ones share keys and values with allows it."""
    for count in range(1, num_layers):
        stages = (StageSpec(0, count), StageSpec(count, num_layers - count))
        specs = [replace(SPEC, rank=RankSpec(rank, 2, ""), stages=stages) for rank in range(2)]
        try:
            return InStages(*(build_model(config, each, CPU, fill, group=AgreedAlready()).model for each in specs))
        except UnsupportedModel:
            continue
    raise AssertionError("the model cannot be cut")


@pytest.mark.parametrize("family", TABLE)
@torch.inference_mode()
def test_stages_and_a_sleep_change_no_logit(family: str) -> None:
    name = list(TABLE[family].changes)[-1]
    config = TABLE[family].config_of(name).to_dict()
    model = build_model(config, SPEC, CPU, fill).model
    (expected,) = Driver(model, 1).logits([TOKENS], CHUNKS)
    assert expected.std() > 0.01
    stages = cast("Decoder", stages_of(config, model.config.num_layers))  # all of one that a driver uses
    (staged,) = Driver(stages, 1).logits([TOKENS], CHUNKS)
    torch.testing.assert_close(staged, expected, rtol=0, atol=1e-5)
    asleep = HostWeights(model.storages())
    asleep.vacate()
    asleep.restore()
    asleep.release()
    (awake,) = Driver(model, 1).logits([TOKENS], CHUNKS)
    assert torch.equal(awake, expected)
