"""Models of the catalogue are sized with its options, or found missing, before their first load."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.topology import Measured, ModelOnNode
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.wire.errors import (
    CortexError,
    LoadFailed,
    RouteNotFound,
    ShuttingDown,
    SourceNotAllowed,
    SourceNotFound,
    UpstreamUnavailable,
)
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

from ..fake_fleet import GB, FakeFleet

SPEC = ModelSpec(id="a", source="/srv/a.gguf")
OUTSIDE = "the path '/srv/a.gguf' is outside the model roots of this node"


def fleet_of(spec: ModelSpec = SPEC) -> FakeFleet:
    fake = FakeFleet({"n": {}, "m": {}}, catalogue=Catalogue(models=(spec, ModelSpec(id="own"))))
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    fake.poll()
    return fake


def respond(fake: FakeFleet, node: str, result: ModelStatus | CortexError, source: str = "/srv/a.gguf") -> None:
    fake.dispatcher.source_inspected(ModelOnNode(node, "a"), source, result)
    fake.dispatcher.sources_inspected(node)


def verdicts(fake: FakeFleet) -> dict[str, tuple[Verdict, int | None]]:
    return {each.node: (each.verdict, each.need_bytes) for each in fake.dispatcher.explain("a").assessments}


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (SPEC, [("n", "a"), ("m", "a")]),
        (ModelSpec(id="a", source="~/a"), [("n", "a"), ("m", "a")]),
        (ModelSpec(id="a", source="/srv/a", only_on=("m",)), [("m", "a")]),
        (ModelSpec(id="a", source="/srv/a", harness="vllm", nodes=("n", "m")), [("n", "a"), ("m", "a")]),
        (ModelSpec(id="a", source="/srv/a", harness="llama"), []),
        (ModelSpec(id="a", source="org/a"), []),
        (ModelSpec(id="a"), []),
    ],
)
def test_nodes_that_may_serve_a_path_are_asked_about_it_once(spec: ModelSpec, asked: list[tuple[str, str]]) -> None:
    fake = fleet_of(spec)
    fake.poll()
    assert fake.inspections == asked


def test_size_is_known_before_the_first_load() -> None:
    fake = fleet_of()
    assert verdicts(fake) == {"n": (Verdict.FITS, None), "m": (Verdict.FITS, None)}
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, source="/srv/a.gguf", estimate_bytes=3 * GB))
    respond(fake, "m", SourceNotAllowed(OUTSIDE))
    assert verdicts(fake) == {"n": (Verdict.FITS, 3 * GB), "m": (Verdict.FAILED, 3 * GB)}
    assert fake.dispatcher.feasibility().nodes("a") == ("n",)


def test_path_that_no_node_can_read_is_an_error_that_says_where_it_was_looked_for() -> None:
    fake = fleet_of()
    gone = "a: there is no complete model at /srv/a.gguf"
    absent = ModelStatus(
        id="a", state=ModelState.COLD, source="/srv/a.gguf", reason=gone, reason_code="source_not_found"
    )
    respond(fake, "n", absent)
    respond(fake, "m", SourceNotAllowed(OUTSIDE))
    assert fake.dispatcher.feasibility().nodes("a") == ()
    (error,) = fake.ask("a")
    assert isinstance(error, LoadFailed)
    assert f"n: {gone}" in error.message
    assert f"m: {OUTSIDE}" in error.message


def test_node_that_was_restarted_is_asked_again() -> None:
    fake = fleet_of()
    fake.inspections.clear()
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, estimate_bytes=GB))
    fake.poll("n")  # it lists nothing any more
    assert fake.inspections == [("n", "a")]


@pytest.mark.parametrize(
    ("error", "is_asked_again"),
    [
        (UpstreamUnavailable("timed out"), True),
        (ShuttingDown("the node is shutting down"), True),
        (SourceNotAllowed(OUTSIDE), False),
        (LoadFailed("load requests have named 1000 models"), False),
        (RouteNotFound("no route"), False),
    ],
)
def test_node_without_a_useful_response_is_asked_again_only_if_that_may_help(
    error: CortexError, is_asked_again: bool
) -> None:
    fake = fleet_of()
    fake.inspections.clear()
    respond(fake, "n", error)
    fake.poll("n")
    assert fake.inspections == [("n", "a")] * is_asked_again


def test_new_catalogue_is_asked_about_and_old_errors_are_gone() -> None:
    fake = fleet_of()
    for node in ("n", "m"):
        respond(fake, node, SourceNotAllowed(OUTSIDE))
    fake.inspections.clear()
    fake.catalogue = Catalogue(models=(ModelSpec(id="a", source="/srv/b.gguf"),))
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    assert verdicts(fake)["n"] == (Verdict.FITS, None)
    fake.poll()
    assert fake.inspections == [("n", "a"), ("m", "a")]


def test_model_that_left_the_catalogue_while_its_files_were_read_is_forgotten() -> None:
    fake = fleet_of()
    fake.catalogue = Catalogue()
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, estimate_bytes=GB))
    respond(fake, "m", SourceNotAllowed(OUTSIDE))
    assert fake.forgotten == [("n", "a"), ("m", "a")]
    assert "a" not in fake.dispatcher.fleet.live_models()


def test_what_is_not_about_the_source_does_not_keep_a_node_from_loading_it() -> None:
    fake = fleet_of()
    respond(fake, "n", LoadFailed("load requests have named 1000 models on this node, which is the limit"))
    assert verdicts(fake)["n"] == (Verdict.FITS, None)


def test_reload_during_an_inspection_waits_for_its_end_and_drops_what_it_finds() -> None:
    fake = fleet_of()
    fake.inspections.clear()
    fake.catalogue = Catalogue(models=(ModelSpec(id="a", source="/srv/b.gguf"),))
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    fake.poll("n")
    assert fake.inspections == [], "the first one still runs"
    respond(fake, "n", SourceNotAllowed(OUTSIDE), "/srv/a.gguf")
    assert verdicts(fake)["n"] == (Verdict.FITS, None)
    fake.poll("n")
    assert fake.inspections == [("n", "a")]


def test_inspection_that_ended_with_its_node_is_not_waited_for() -> None:
    fake = fleet_of()
    fake.inspections.clear()
    fake.dispatcher.reconfigure(fake.settings("n", "m", endpoint="http://y"))
    fake.poll("n")
    assert fake.inspections == [("n", "a")]


def test_source_that_a_node_can_read_after_all_is_no_longer_rejected() -> None:
    fake = fleet_of()
    respond(fake, "n", SourceNotAllowed(OUTSIDE))
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, source="/srv/a.gguf", estimate_bytes=GB))
    fake.poll("n")  # which does not list it, as after a restart
    assert verdicts(fake)["n"][0] is Verdict.FITS


# Models that nodes list themselves


def listing_fleet(spec: ModelSpec) -> FakeFleet:
    """Both nodes have found the model, which takes 2 GB there without options."""
    fake = FakeFleet({"n": {"a": 2 * GB}, "m": {"a": 2 * GB}}, catalogue=Catalogue(models=(spec,)))
    fake.poll()
    return fake


def use(fake: FakeFleet, *specs: ModelSpec) -> None:
    for node in ("n", "m"):
        fake.dispatcher.sources_inspected(node)
    fake.inspections.clear()
    fake.catalogue = Catalogue(models=specs)
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    fake.poll()


@pytest.mark.parametrize("source", [None, "org/a"])
def test_nodes_are_asked_about_the_options_of_models_that_they_list(source: str | None) -> None:
    fake = listing_fleet(ModelSpec(id="a", source=source, kv_dtype="fp8", host_weights="off"))
    fake.poll()
    assert fake.inspections == [("n", "a"), ("m", "a")]
    assert fake.inspect_requests == [LoadRequest(model_id="a", source=source, kv_dtype="fp8", host_weights="off")] * 2
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, estimate_bytes=GB), source or "")
    assert {node: need for node, (_, need) in verdicts(fake).items()} == {"n": GB, "m": 2 * GB}
    assert fake.forgotten == []


def test_quantisation_and_context_of_a_listed_model_are_left_to_the_gateway() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8", quant="q4_k", context_tokens=4096))
    assert fake.inspect_requests == [LoadRequest(model_id="a", kv_dtype="fp8")] * 2


def test_nodes_are_asked_again_when_options_change_or_are_gone() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8"))
    use(fake, ModelSpec(id="a", kv_dtype="fp8", vision="off"))
    assert fake.inspections == [("n", "a"), ("m", "a")]
    use(fake, ModelSpec(id="a"))
    assert fake.inspections == [("n", "a"), ("m", "a")]
    assert fake.inspect_requests[-1] == LoadRequest(model_id="a")
    use(fake)
    assert fake.inspections == []
    assert fake.forgotten == [("n", "a"), ("m", "a")]


def test_response_for_an_entry_that_is_gone_makes_the_node_forget_its_options() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8"))
    use(fake)
    fake.forgotten.clear()
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, estimate_bytes=GB), "")
    assert fake.forgotten == [("n", "a")]


def test_node_that_lists_the_model_after_a_restart_is_asked_again() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8"))
    respond(fake, "n", ModelStatus(id="a", state=ModelState.COLD, estimate_bytes=GB), "")
    fake.inspections.clear()
    fake.uptime_s += 1
    fake.poll("n")
    assert fake.inspections == []
    fake.uptime_s = 0.5
    fake.poll("n")
    assert fake.inspections == [("n", "a")]


def test_model_in_memory_is_asked_about_once_it_is_cold() -> None:
    fake = FakeFleet({"n": {"a": 2 * GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", kv_dtype="fp8"),)))
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    assert fake.inspections == []
    del fake.ready["n"]["a"]
    fake.poll()
    assert fake.inspections == [("n", "a")]


def test_listed_model_is_not_rejected_for_an_error_of_its_inspection() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8"))
    respond(fake, "n", SourceNotFound("gone"), "")
    assert fake.forgotten == []
    assert verdicts(fake)["n"][0] is Verdict.FITS


# Sources on the hub, under an id that no node lists


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (ModelSpec(id="x", source="org/a", kv_dtype="fp8"), ["n"]),
        (ModelSpec(id="x", source="org/a@main:Q8_0", context_tokens=4096), ["n"]),
        (ModelSpec(id="org/a:q4_k_m"), ["n"]),
        (ModelSpec(id="x", source="org/a", quant="q4_k", only_on=("m",)), []),
        (ModelSpec(id="x", source="org/b"), []),
        (ModelSpec(id="x", source="org/a", harness="vllm", nodes=("n", "m")), []),
    ],
)
def test_nodes_with_the_files_of_a_source_are_asked_about_the_options_of_its_entry(
    spec: ModelSpec, asked: list[str]
) -> None:
    fake = FakeFleet(
        {"n": {"org/a": 2 * GB, "copy": 2 * GB}, "m": {"other": GB}},
        catalogue=Catalogue(models=(spec,)),
        sources={"org/a": "org/a", "copy": "org/a", "other": "org/other"},
    )
    fake.poll()
    fake.poll()
    assert fake.inspections == [(node, spec.id) for node in asked]
    assert fake.inspect_requests == [spec.load_request] * len(asked)
    if asked:
        cold = ModelStatus(id=spec.id, state=ModelState.COLD, source=spec.source, estimate_bytes=GB)
        fake.dispatcher.source_inspected(ModelOnNode("n", spec.id), spec.source or "", cold)
        fake.dispatcher.sources_inspected("n")
        needs = {each.node: each.need_bytes for each in fake.dispatcher.explain(spec.id).assessments}
        assert needs == {"n": GB, "m": GB}


def test_entry_with_a_source_is_sized_with_all_its_options_also_after_a_restart_of_the_gateway() -> None:
    spec = ModelSpec(id="x", source="org/a", context_tokens=4096, quant="q4_k")
    sources = {"org/a": "org/a", "x": "org/a"}
    fake = FakeFleet({"n": {"org/a": 2 * GB, "x": GB}}, catalogue=Catalogue(models=(spec,)), sources=sources)
    fake.poll()
    assert fake.inspect_requests == [spec.load_request]


def test_node_that_gets_the_files_of_a_source_is_asked_about_its_entry() -> None:
    spec = ModelSpec(id="x", source="org/a", kv_dtype="fp8")
    fake = FakeFleet({"n": {}}, catalogue=Catalogue(models=(spec,)), sources={"org/a": "org/a"})
    fake.poll()
    assert fake.inspections == []
    fake.sizes["n"]["org/a"] = 2 * GB
    fake.poll()
    assert fake.inspections == [("n", "x")]


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [({}, {"kv_dtype": "fp8"}), ({"vision": "off"}, {"vision": "cpu"}), ({"vision": "off"}, None)]
)
def test_size_that_was_measured_with_other_options_does_not_count(
    before: dict[str, Any], after: dict[str, Any] | None, is_loaded: bool
) -> None:
    fake = listing_fleet(ModelSpec(id="a", **before))
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    if not is_loaded:
        del fake.ready["n"]["a"]
        fake.poll()
    assert fake.dispatcher.fleet.measured
    use(fake, ModelSpec(id="a", display_name="A", **before))
    assert fake.dispatcher.fleet.measured, "the size is the same"
    use(fake, *([] if after is None else [ModelSpec(id="a", **after)]))
    assert not fake.dispatcher.fleet.measured
    fake.ready["n"].pop("a", None)
    fake.poll()
    assert not fake.dispatcher.fleet.measured
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    assert fake.dispatcher.fleet.measured, "the next load is measured"


def test_size_that_an_earlier_run_measured_counts_after_the_start() -> None:
    fake = listing_fleet(ModelSpec(id="a", kv_dtype="fp8"))
    measured: Measured = {("a", None, None): GB}
    dispatcher = Dispatcher(fake, fake.event_log, lambda: fake.now, fake.settings("n"), measured=measured)
    assert dispatcher.fleet.measured == measured
