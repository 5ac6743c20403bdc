"""A real gateway and a node whose device is too small for a mixture: weights in host memory, and where that is said."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from cortex.cli.cortex import cortex
from cortex.cli.failures import exit_code_of

from ...neuron.tiny_models import tiny_experts, tiny_sizes
from ...waiting import wait_until
from .conftest import write_model

if TYPE_CHECKING:
    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

DEVICE_MB, HOST_MB = 28, 60
"""Each of two models takes about 42 MiB, of which 36 are experts; two divided ones have room on neither."""
SIZES = tiny_sizes(vocab_size=256, hidden_size=128, num_hidden_layers=6, max_position_embeddings=512)
CONFIG = {
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    **SIZES,
    **tiny_experts(num_experts=8, moe_intermediate_size=512),
}


def write_mixture(folder: Path) -> Path:
    """A random mixture with the tokenizer of the other small models."""
    write_model(folder, inner=32)
    hidden, head = SIZES["hidden_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * head, SIZES["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (256, hidden),
        "model.norm": (hidden,),
        "lm_head": (256, hidden),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm": (hidden,),
            f"{block}.post_attention_layernorm": (hidden,),
            f"{block}.self_attn.q_proj": (queries, hidden),
            f"{block}.self_attn.k_proj": (keys, hidden),
            f"{block}.self_attn.v_proj": (keys, hidden),
            f"{block}.self_attn.o_proj": (hidden, queries),
            f"{block}.self_attn.q_norm": (head,),
            f"{block}.self_attn.k_norm": (head,),
            f"{block}.mlp.gate": (8, hidden),
        }
        for expert in range(8):
            shapes |= {
                f"{block}.mlp.experts.{expert}.{name}": (512, hidden) if name != "down_proj" else (hidden, 512)
                for name in ("gate_proj", "up_proj", "down_proj")
            }
    generator = torch.Generator().manual_seed(3)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.05
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def node(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    path = write_mixture(tmp_path_factory.mktemp("mixture"))
    dense = write_model(tmp_path_factory.mktemp("dense"), inner=6144, num_layers=8)
    return start_daemon(
        f"limits = {{ host_mb = {HOST_MB}, max_num_seqs = 4, min_free_vram_mb = 0 }}",
        f"[[devices]]\nindex = 0\nmemory_mb = {DEVICE_MB}",
        *(f'[[models]]\nid = "{name}"\nsource = "{path}"' for name in ("moe", "second")),
        f'[[models]]\nid = "on-device"\nsource = "{path}"\nhost_weights = "off"',
        f'[[models]]\nid = "dense"\nsource = "{dense}"\nhost_weights = "auto"',
        dtype="float32",
    )


@pytest.fixture(scope="module")
def gateway(node: Daemon, start_gateway: StartGateway) -> Daemon:
    gateway = start_gateway("", {"n": node})
    wait_until(lambda: explained(gateway, "second")["need_bytes"], "the models were not read")
    return gateway


def explained(gateway: Daemon, model: str) -> dict[str, Any]:
    return dict(gateway.call(f"/fleet/explain/{model}")[1]["nodes"][0])


def is_read(gateway: Daemon, model: str) -> bool:
    return explained(gateway, model)["need_bytes"] is not None


def node_of(gateway: Daemon) -> dict[str, Any]:
    return dict(gateway.call("/fleet/status")[1]["nodes"][0])


def order(gateway: Daemon, model: str, name: str = "load", **options: Any) -> dict[str, Any]:
    status, response = gateway.call(f"/fleet/models/{model}/{name}", options)
    assert status == 200, response
    return dict(response)


def run(gateway: Daemon, *arguments: str) -> tuple[int, str]:
    env = {"CORTEX_URL": gateway.url, "COLUMNS": "160"}
    result = CliRunner().invoke(cortex, arguments, env=env, standalone_mode=False)
    return exit_code_of(result.exception) if result.exception else 0, result.output


def test_bytes_and_speed_are_said_before_the_load(gateway: Daemon) -> None:
    expected = explained(gateway, "moe")
    assert expected["verdict"] == "fits", expected["reason"]
    assert "of its weights in host memory, about" in expected["reason"]
    host = expected["host"]
    assert 0 < host["need_bytes"] <= host["have_bytes"] <= HOST_MB << 20
    assert host["tokens_per_s"] > 0
    preview = order(gateway, "moe", dry_run=True)
    assert "of host memory, about" in preview["outcome"]
    assert "tokens/s expected" in preview["outcome"]
    code, shown = run(gateway, "fits", "moe")
    assert code == 0
    assert "yes, with host memory" in shown
    assert "host memory" in run(gateway, "explain", "moe")[1]


def test_dense_model_is_the_last_resort_with_its_speed_said_before_the_load(node: Daemon, gateway: Daemon) -> None:
    wait_until(lambda: explained(gateway, "dense")["need_bytes"], "the model was not read")
    assert "of its weights in host memory, about" in explained(gateway, "dense")["reason"]
    assert "tokens/s expected" in order(gateway, "dense", dry_run=True)["outcome"]
    assert "yes, with host memory" in run(gateway, "fits", "dense")[1]
    order(gateway, "dense")
    assert node.model("dense")["host_bytes"] > 10 << 20
    assert node.complete("dense")[0] == 200
    order(gateway, "dense", "unload")


def test_model_that_may_not_use_host_memory_fits_nowhere(gateway: Daemon) -> None:
    assert explained(gateway, "on-device")["verdict"] == "too_small"
    code, shown = run(gateway, "fits", "on-device")
    assert code == 7
    assert " no " in shown


def test_loaded_model_says_what_lies_where_and_serves(node: Daemon, gateway: Daemon) -> None:
    expected = explained(gateway, "moe")["host"]["need_bytes"]
    order(gateway, "moe")
    status = node.model("moe")
    assert status["state"] == "ready"
    assert status["host_bytes"] == pytest.approx(expected, rel=0.25)
    host = node.call("/health")[1]["host"]
    assert host["weight_bytes"] == status["host_bytes"] <= host["budget_bytes"] <= HOST_MB << 20
    assert node.complete("moe")[0] == 200
    assert "in RAM" in run(gateway, "ps")[1]
    wait_until(lambda: node_of(gateway)["host"]["weight_bytes"] > 0, "the gateway does not know it")
    assert "host memory" in run(gateway, "status")[1]


def test_model_in_host_memory_is_evicted_for_another_that_needs_it(node: Daemon, gateway: Daemon) -> None:
    order(gateway, "moe")
    wait_until(lambda: explained(gateway, "second")["victims"] == ["moe"], "it is no victim")
    order(gateway, "second")
    assert (node.model("second")["state"], node.model("moe")["state"]) == ("ready", "cold")
    host = node.call("/health")[1]["host"]
    assert host["weight_bytes"] == node.model("second")["host_bytes"] > 0


def test_model_larger_than_all_devices_together_is_divided_among_them_and_the_host(
    start_daemon: StartDaemon, start_gateway: StartGateway, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_mixture(tmp_path_factory.mktemp("parts"))
    node = start_daemon(
        "cpu_devices = 2",
        "limits = { max_num_seqs = 2, min_free_vram_mb = 0 }",
        *(f"[[devices]]\nindex = {index}\nmemory_mb = 15" for index in range(2)),
        *(f'[[models]]\nid = "{name}"\nsource = "{path}"\n{name}_parallel = 2' for name in ("tensor", "pipeline")),
        dtype="float32",
    )
    gateway = start_gateway("", {"n": node})
    for name in ("tensor", "pipeline"):
        wait_until(partial(is_read, gateway, name), "the model was not read")
        expected = explained(gateway, name)
        assert expected["host"]["need_bytes"] > 0, expected["reason"]
        order(gateway, name)
        status = node.model(name)
        assert (status["state"], len(status["devices"])) == ("ready", 2)
        assert 0 < status["host_bytes"] < 1.5 * expected["host"]["need_bytes"]
        assert node.complete(name)[0] == 200
        order(gateway, name, "unload")
    assert node.call("/health")[1]["host"]["weight_bytes"] == 0
