"""Every family with weights in host memory: the device and the CPU compute together what the device computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cortex.neuron.engine.loading.loading import LoadedModel, build_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.moe.host_memory import processors_of_one_node
from cortex.neuron.kernels.moe.host_team import HostRates, HostTeam
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.host_division import movable_layers
from cortex.neuron.models.registry import FAMILIES
from cortex.neuron.models.sizes import WeightStorage

from ..named_weights import fill_by_name
from ..tiny_models import tiny_experts
from .driver import CPU, Driver
from .family_models import TABLE
from .qwen_models import QWEN
from .tiny_family import LATENT, SIZES, VOCAB

NUM_POSITIONS = 128
SPEC = LoadSpec("", dtype="float32", context_tokens=NUM_POSITIONS, max_num_seqs=4, speculation="off", vision="off")
TOKENS = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(0))
CHUNKS = [[74, 1, 5]]
"""With 74 rows the weights come to the device, with few the CPU computes."""
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        f"{family}, {name}": each.config_of(name).to_dict()
        for family, each in (QWEN | TABLE).items()
        for name in each.changes
    },
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "text_config": {**SIZES, **tiny_experts()}},
    "kimi_k2": {
        **{"model_type": "kimi_k2", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **SIZES, **LATENT},
    },
}


def divided(config: dict[str, Any], whole: LoadedModel) -> Decoder:
    """The same model with half of each layer's routed experts in host memory, and the blocks of layers that have none;
    and with memory for the same sequences."""
    team = HostTeam(
        CPU,
        torch.float32,
        lambda size: torch.zeros(size, dtype=torch.uint8),
        buffer_experts=2,
        processors=processors_of_one_node(),
    )
    architecture = whole.model.architecture
    layers = movable_layers(architecture, WeightStorage(torch.float32.itemsize))
    parameters = Parameters(CPU, torch.float32, host=team)
    model = Decoder(architecture.hosting([-(-layer.num_movable // 2) for layer in layers]), parameters, NUM_POSITIONS)
    fill_by_name(parameters)
    team.prepare()
    team.rates = HostRates(host=1e9, bus=1.0)
    SequenceMemory(model, whole.memory.num_pages, PAGE_TOKENS, whole.memory.slots, torch.float32, CPU)
    return model


def test_no_family_of_the_registry_is_missing() -> None:
    tested = {config["model_type"] for config in CONFIGS.values()}
    assert not FAMILIES.keys() - tested - {"qwen3_vl", "muse_glimmer_text"}, "these have the layers of another one"


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_weights_in_host_memory_change_no_logit(name: str) -> None:
    whole = build_model(CONFIGS[name], SPEC, CPU, fill_by_name)
    (expected,) = Driver(whole.model, 1).logits([TOKENS], CHUNKS)
    assert expected.std() > 0.01
    (found,) = Driver(divided(CONFIGS[name], whole), 1).logits([TOKENS], CHUNKS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
