"""Paths below `/upstream/`: which part is the model, and what nodes and foreign servers get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.topology import Abilities, ModelOnNode
from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.proxy.opaque_inference import OpaqueInference
from cortex.gateway.proxy.outgoing_body import OpaqueBody
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.request import Request
from cortex.wire.errors import ModelNotFound


def request(path: str) -> Request:
    return Request(b"POST", path.encode(), b"a=1", (), b"body", "127.0.0.1")


def split(path: str, catalogue: Catalogue) -> tuple[str, str]:
    services = SimpleNamespace(dispatcher=SimpleNamespace(resolve=lambda name: catalogue.resolve(name, ("live/one",))))
    inference = OpaqueInference(cast("Any", SimpleNamespace(services=services)), CrossSiteCheck())
    return inference._split(request(path))  # noqa: SLF001 - the rest of a request needs a gateway


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/upstream/org/m/v1/x", ("org/m", "/v1/x")),
        ("/upstream/org/short/v1/x", ("org/short", "/v1/x")),
        ("/upstream/live/one/v1/x", ("live/one", "/v1/x")),
        ("/upstream/other/v1/x", ("other", "/v1/x")),
        ("/upstream/org", ("org", "/")),
    ],
    ids=["id", "alias", "listed by a node", "pattern", "pattern without a path"],
)
def test_exact_names_win_over_patterns_that_match_less_of_the_path(path: str, expected: tuple[str, str]) -> None:
    models = (ModelSpec(id="org/m"), ModelSpec(id="default"))
    assert split(path, Catalogue(models=models, aliases={"org/short": "org/m", "*": "default"})) == expected


def test_path_without_a_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        split("/upstream/org/n/v1", Catalogue(models=(ModelSpec(id="org/m"),)))


def test_each_attempt_has_the_path_for_its_kind_of_node() -> None:
    body = OpaqueBody(request("/upstream/org/m/v1/x"), "org/m", "/v1/x")
    node = Lease("node", "org/m", ModelOnNode("node", "org/m"))
    foreign = Lease("foreign", "org/m", ModelOnNode("foreign", "org/m"), Abilities(False, False))
    targets = []
    for lease in (foreign, node, foreign):
        assert body.choose(lease)
        targets.append(body.made()[0])
    assert targets == [b"/v1/x?a=1", b"/upstream/org%2Fm/v1/x?a=1", b"/v1/x?a=1"]
