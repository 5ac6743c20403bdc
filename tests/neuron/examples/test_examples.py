"""The example files, and every hub id in the documentation, against listings of the hub that the tests keep.

The listings were written down, not downloaded: names of the files, and sizes, rounded where they are not exact. A
checkpoint with the tensors of each architecture is written without its data, so that the node's own preflight reads it.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.fleet.catalogue import Catalogue
from cortex.fleet.devices import DeviceState
from cortex.fleet.placement.place import place
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.config import load as load_gateway
from cortex.neuron.config import NeuronConfig
from cortex.neuron.config import load as load_neuron
from cortex.neuron.engine.memory.plan import CACHED_CONTEXTS
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.inspection_process.preflight import inspect
from cortex.neuron.node.library import KnownModel
from cortex.neuron.weights.hub.listing import parse_listing
from cortex.neuron.weights.hub.selection import Selection, select
from cortex.neuron.weights.hub.source import HubSource, parse_source
from cortex.settings import loads
from cortex.wire.node.protocol import Device, ModelState, ModelStatus

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
LISTINGS: dict[str, Any] = json.loads((Path(__file__).parent / "hub_listings.json").read_text())
MEBIBYTE = 1 << 20
CARDS = {"attic": 24_564 * MEBIBYTE, "beast": 81_559 * MEBIBYTE}
"""The fleet that examples/models.toml names: the memory that cards of 24 and of 80 GB report."""
_HUB_ID = re.compile(r"\b(?:Qwen|unsloth)/[\w.-]*\w(?::\w+)?")


def catalogue() -> Catalogue:
    return loads(Catalogue, (EXAMPLES / "models.toml").read_text())


def selection(start_hub: Any, source: str, quant: str | None = None) -> tuple[Selection, int]:
    """The files that a node would download, and their bytes."""
    parsed = parse_source(source)
    assert isinstance(parsed, HubSource), source
    sizes = LISTINGS[parsed.repository]["files"]
    hub = start_hub(dict.fromkeys(sizes, b""), repository=parsed.repository, sizes=sizes)
    listing = parse_listing(json.dumps(hub.listing()).encode(), hub.endpoint)
    chosen = select(parsed.repository, listing.files, quant or parsed.quant)
    return chosen, sum(listing.files[path].num_bytes for path in chosen.paths)


def dense_tensors(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """The tensors of a Qwen3 checkpoint."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield f"{layer}self_attn.q_proj.weight", [queries, hidden]
        yield f"{layer}self_attn.k_proj.weight", [keys, hidden]
        yield f"{layer}self_attn.v_proj.weight", [keys, hidden]
        yield f"{layer}self_attn.o_proj.weight", [hidden, queries]
        yield f"{layer}self_attn.q_norm.weight", [head]
        yield f"{layer}self_attn.k_norm.weight", [head]
        yield f"{layer}mlp.gate_proj.weight", [inner, hidden]
        yield f"{layer}mlp.up_proj.weight", [inner, hidden]
        yield f"{layer}mlp.down_proj.weight", [hidden, inner]
        yield f"{layer}input_layernorm.weight", [hidden]
        yield f"{layer}post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A model directory whose weights take no room on the disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in dense_tensors(config):
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    first = b"\1"  # of the embedding: it is not a copy of the output matrix, which is seen where the first byte differs
    weights.write_bytes(struct.pack("<Q", len(encoded)) + encoded + first)
    os.truncate(weights, 8 + len(encoded) + end)
    return folder


def footprint(model: KnownModel, repository: str, card_bytes: int, tmp_path: Path, num_bytes: int) -> Footprint:
    """What the model takes of a card, by the node's own forecast. Of a GGUF only the size of the file is known: its
    weights stay quantised on a GPU."""
    config = LISTINGS[repository]["config"]
    device = Device(index=0, kind="cuda", name="card", total_bytes=card_bytes)
    forecast = Forecast(NeuronConfig())
    if repository.endswith("-GGUF"):
        architecture = read_architecture(config)
        tokens = model.context_tokens or architecture.config.context_tokens
        cache_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * tokens
        usable_bytes = MemoryReserve.on("cuda", card_bytes, 256 * MEBIBYTE).usable_bytes(card_bytes)
        return Footprint(num_bytes + cache_bytes // 8, min(usable_bytes, num_bytes + CACHED_CONTEXTS * cache_bytes))
    facts = inspect(write_checkpoint(tmp_path / model.id, config), model.quant, name=model.id)
    return forecast.footprint(model, facts, [device])


def test_every_example_file_is_valid() -> None:
    environment = {"CORTEX_NODE_KEY": "x" * 16, "ELSEWHERE_KEY": "x" * 16}
    config = load_gateway(EXAMPLES / "cortex.toml", environment)
    neuron = load_neuron(EXAMPLES / "neuron.toml", {})
    names = {node.name for node in config.neurons}
    for spec in catalogue().models:
        assert set(spec.pinned_on) <= names
    assert {entry.id for entry in neuron.default_models} <= {spec.id for spec in catalogue().models}


@pytest.mark.parametrize("model_id", [spec.id for spec in catalogue().models])
def test_model_of_the_example_catalogue_resolves_on_the_hub(start_hub: Any, model_id: str) -> None:
    spec = catalogue().spec(model_id)
    chosen, num_bytes = selection(start_hub, spec.source or spec.id, spec.quant)
    assert num_bytes > 1e9
    assert (chosen.entry is not None) == (spec.source or "").endswith("-GGUF")


def test_example_catalogue_fits_the_fleet_that_it_names_without_an_eviction(start_hub: Any, tmp_path: Path) -> None:
    specs = catalogue()
    cards = {
        name: DeviceState(index=0, kind="cuda", name="card", total_bytes=size, free_bytes=size)
        for name, size in CARDS.items()
    }
    held: dict[str, dict[str, Residency]] = {name: {} for name in CARDS}
    for number, model_id in enumerate(("coder", "large", "small")):
        spec = specs.spec(model_id)
        source = spec.source or spec.id
        _, num_bytes = selection(start_hub, source, spec.quant)
        model = KnownModel(id=spec.id, source=source, quant=spec.quant, context_tokens=spec.context_tokens)
        nodes = []
        for name, card in cards.items():
            need = footprint(model, source, card.total_bytes, tmp_path / f"{number}-{name}", num_bytes)
            reserve = MemoryReserve.on("cuda", card.total_bytes, 256 * MEBIBYTE)
            status = ModelStatus(
                id=spec.id,
                state=ModelState.COLD,
                estimate_bytes=need.expected_bytes,
                least_bytes=need.least_bytes,
            )
            used = sum(each.num_bytes or 0 for each in held[name].values())
            there = DeviceState(
                index=0,
                kind="cuda",
                name=card.name,
                total_bytes=card.total_bytes,
                free_bytes=card.total_bytes - used,
                kept_free_bytes=reserve.num_bytes,
            )
            residencies = {**held[name], spec.id: Residency(status=status, seen_at=0.0)}
            nodes.append(Node(name=name, devices=(there,), residencies=residencies, healthy=True))
        decision = place(model_id, Fleet(nodes=tuple(nodes), catalogue=specs), 1000.0, origin="operator")
        assert (decision.action, decision.victims) == ("load", ()), decision.assessments
        assert decision.node is not None
        if spec.pinned_on:
            assert decision.node in spec.pinned_on
        ready = ModelStatus(
            id=spec.id, state=ModelState.READY, devices=decision.devices, measured_bytes=decision.takes_bytes
        )
        held[decision.node][spec.id] = Residency(status=ready, seen_at=0.0)


def test_recorded_sizes_are_those_of_the_architectures() -> None:
    for repository in ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"):
        listed = LISTINGS[repository]
        recorded = sum(size for name, size in listed["files"].items() if name.endswith(".safetensors"))
        computed = sum(
            2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in dense_tensors(listed["config"])
        )
        assert recorded == pytest.approx(computed, rel=0.001), repository


def documented() -> set[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "packaging").rglob("*.*aml")]
    pages += [*EXAMPLES.glob("*.toml"), *(ROOT / "src" / "cortex" / "cli").rglob("*.py")]
    return {found for page in pages for found in _HUB_ID.findall(page.read_text())}


@pytest.mark.parametrize("source", sorted(documented()))
def test_hub_id_in_the_documentation_resolves(start_hub: Any, source: str) -> None:
    quant = "Q4_K_M" if source.endswith("-GGUF") else None  # named in addition
    chosen, _ = selection(start_hub, source, quant)
    assert chosen.paths
