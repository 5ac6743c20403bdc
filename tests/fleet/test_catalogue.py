from __future__ import annotations

from pathlib import Path

import pytest

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec, near_misses
from cortex.settings import SettingsError, loads
from cortex.wire.errors import ModelNotFound

TEXT = """
[[models]]
id = "Qwen/Qwen3-4B"
vram_mb = 9000
pinned_on = ["beast"]
[[models]]
id = "big"
source = "Qwen/Qwen3-32B"
quant = "q4_k"
tensor_parallel = 2
ttl_s = 600
cost = { input = 0.1, output = 0.4 }
capabilities = ["tools", "reasoning"]
[aliases]
gpt-4o = "big"
"claude-*" = "big"
"claude-*haiku*" = { model = "Qwen/Qwen3-4B", background = true }
"""


@pytest.fixture
def catalogue() -> Catalogue:
    return loads(Catalogue, TEXT)


@pytest.mark.parametrize(
    ("name", "model_id", "alias", "background"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", None, False),
        ("gpt-4o", "big", "gpt-4o", False),
        ("claude-opus-4", "big", "claude-*", False),
        ("claude-3-5-haiku-20241022", "Qwen/Qwen3-4B", "claude-*haiku*", True),
        ("found-by-a-node", "found-by-a-node", None, False),
        ("claude-found-by-a-node", "claude-found-by-a-node", None, False),
    ],
)
def test_resolves_name_to_one_model(
    catalogue: Catalogue, name: str, model_id: str, alias: str | None, background: bool
) -> None:
    resolution = catalogue.resolve(name, {"found-by-a-node", "claude-found-by-a-node", "gpt-4o"})
    assert (resolution.model_id, resolution.alias, resolution.background) == (model_id, alias, background)


def test_alias_may_name_a_model_outside_the_catalogue() -> None:
    catalogue = Catalogue(aliases={"fast": Alias(model="on-a-node")})
    assert catalogue.resolve("fast").spec == ModelSpec(id="on-a-node")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen3-4Bx", "`Qwen/Qwen3-4B`"),
        ("qwen/qwen3-4bx", "`Qwen/Qwen3-4B`"),
        ("gpt4o", "`gpt-4o`"),
        ("zzz", "GET /v1/models"),
    ],
)
def test_unknown_name_gets_near_misses(catalogue: Catalogue, name: str, advice: str) -> None:
    with pytest.raises(ModelNotFound, match=advice):
        catalogue.resolve(name)


def test_unknown_name_in_an_empty_fleet_says_no_node_lists_models() -> None:
    with pytest.raises(ModelNotFound, match="no node lists any model yet"):
        Catalogue().resolve("x")


def test_near_misses_are_few_and_without_repeats() -> None:
    known = [f"org/qwen3-{size}b" for size in (1, 2, 4, 8, 14, 32)]
    misses = near_misses("qwen3-3b", known)
    assert len(misses) == len(set(misses)) == 3


@pytest.mark.parametrize(
    ("facts", "policy", "pinned_on_beast"),
    [
        ({}, "on_demand", False),
        ({"pinned_on": ("beast",)}, "pinned", True),
        ({"pinned_on": ("other",)}, "pinned", False),
        ({"load": "pinned"}, "pinned", True),
        ({"load": "manual"}, "manual", False),
        ({"load": "on_demand", "pinned_on": ("beast",)}, "on_demand", True),
    ],
)
def test_load_policy_defaults_by_pinned_on(facts: dict[str, object], policy: str, pinned_on_beast: bool) -> None:
    spec = ModelSpec(id="x", **facts)  # type: ignore[arg-type]
    assert (spec.policy, spec.is_pinned_on("beast")) == (policy, pinned_on_beast)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[models]]\nid='a'\n[[models]]\nid='a'", "model id `a` is given twice"),
        ("[[models]]\nid='a'\n[aliases]\na='b'", "alias `a` is also the id of a model"),
        (
            "[[models]]\nid='a'\nvramm_mb=3",
            r"unknown key models\[0\].vramm_mb in models.toml line 3: did you mean `vram_mb`",
        ),
        ("[[models]]\nid='a'\nttl_s=-1", r"models\[0\].ttl_s in models.toml line 3"),
        (
            "[aliases]\na='b'\n'c*'={modl='x'}",
            "unknown key aliases.c[*].modl in models.toml line 3: did you mean `model`",
        ),
    ],
)
def test_rejects_contradictory_catalogue(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        loads(Catalogue, text, file=Path("models.toml"))
