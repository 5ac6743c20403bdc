"""A real gateway and a real node with little memory: how much context models get, and where that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ...waiting import wait_until
from .conftest import write_model

if TYPE_CHECKING:
    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

FULL, SHORTER = 131_072, 73_728
MEMORY_MB = 160
"""Room for a full context of the one (75 MiB) or four of the other (149 MiB), and 11 MiB next to those."""


@pytest.fixture(scope="module")
def node(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    path = write_model(tmp_path_factory.mktemp("long"), inner=128, context_tokens=FULL)
    return start_daemon(
        f"limits = {{ memory_mb = {MEMORY_MB}, max_num_seqs = 4 }}",
        f'[[models]]\nid = "long"\nsource = "{path}"',
        f'[[models]]\nid = "other"\nsource = "{path}"\ncontext_tokens = {SHORTER}',
        f'[[models]]\nid = "named"\nsource = "{path}"\ncontext_tokens = 2048',
        dtype="float32",
    )


@pytest.fixture(scope="module")
def gateway(node: Daemon, start_gateway: StartGateway) -> Daemon:
    gateway = start_gateway('[[models]]\nid = "named"\ncontext_tokens = 32768', {"n": node})

    def are_known() -> bool:
        return all(explained(gateway, model)["need_bytes"] for model in ("long", "other", "named"))

    wait_until(are_known, "the models were not read")
    return gateway


def explained(gateway: Daemon, model: str) -> dict[str, Any]:
    """What `explain` says about the only node."""
    return dict(gateway.call(f"/fleet/explain/{model}")[1]["nodes"][0])


def order(gateway: Daemon, model: str, name: str = "load", **options: Any) -> dict[str, Any]:
    status, response = gateway.call(f"/fleet/models/{model}/{name}", options)
    assert status == 200, response
    return dict(response)


def check_dry_run(gateway: Daemon, node: Daemon, model: str) -> dict[str, Any]:
    """Loads the model as the dry run has said; returns what that said of the node."""
    decision = order(gateway, model, dry_run=True)
    order(gateway, model)
    loaded, expected = node.model(model), decision["nodes"][0]
    assert loaded["measured_bytes"] == pytest.approx(expected["takes_bytes"], rel=0.1)
    assert expected["context_tokens"] <= loaded["context_tokens"] <= 1.5 * expected["context_tokens"]
    return {**expected, "outcome": decision["outcome"]}


def test_dry_run_counts_the_context_of_the_catalogue_where_the_node_names_a_shorter_one(
    node: Daemon, gateway: Daemon
) -> None:
    assert check_dry_run(gateway, node, "named")["context_tokens"] == 32_768
    order(gateway, "named", "unload")


def test_model_gets_its_full_context_of_an_idle_model_and_less_is_said_everywhere(
    node: Daemon, gateway: Daemon
) -> None:
    check_dry_run(gateway, node, "other")
    evicting = check_dry_run(gateway, node, "long")
    assert (evicting["victims"], evicting["context_tokens"]) == (["other"], FULL)
    assert (node.model("long")["context_tokens"], node.model("other")["state"]) == (FULL, "cold")

    order(gateway, "long", "unload")
    order(gateway, "other", "pin")
    short = check_dry_run(gateway, node, "long")
    tokens = node.model("long")["context_tokens"]
    assert tokens < 32_768
    assert short["context_is_short"]
    assert "with a context of only about" in short["outcome"]
    assert "a context of 32,768 tokens is not possible: only models that cannot be evicted" in short["reason"]
    limited = f"context limited to {tokens:,} of {FULL:,} tokens by memory"
    assert f"context {tokens:,} of {FULL:,} tokens" in explained(gateway, "long")["reason"]
    listed = gateway.call("/v1/models/long")[1]
    assert listed["max_model_len"] == tokens
    assert listed["limit"]["full_context"] == FULL
    events = [each for each in gateway.call("/fleet/decisions?model=long")[1]["events"] if "why" in each]
    assert [(each["kind"], each["why"]) for each in events] == [("model_loaded", limited)]
    for log in (node.log, gateway.log):
        assert limited in log.read_text()
    order(gateway, "other", "unpin")  # this gateway keeps running next to those of other tests


def test_rejected_prompt_has_its_model_loaded_again_once_the_other_is_no_longer_pinned(
    node: Daemon, gateway: Daemon
) -> None:
    for model in ("long", "other"):
        order(gateway, model, "load")
        order(gateway, model, "unload", unpin=True)
    order(gateway, "other", "pin")
    order(gateway, "long")
    tokens = node.model("long")["context_tokens"]
    assert tokens < 32_768
    body = {"model": "long", "prompt": [5] * tokens, "max_tokens": 1}

    def is_rejected() -> bool:
        status, response = gateway.call("/v1/completions", body)
        assert status == 200 or response["error"]["code"] == "context_length_exceeded", response
        return status != 200

    assert is_rejected()
    assert node.model("other")["state"] == "ready"
    order(gateway, "other", "unpin")
    wait_until(lambda: not is_rejected(), "the model kept its short context")
    assert node.model("long")["context_tokens"] == FULL
