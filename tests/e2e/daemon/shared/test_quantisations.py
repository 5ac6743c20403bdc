"""Which files a quantisation takes from a hub, and what a node reports of them: a real daemon, over HTTP."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cortex.neuron.engine.memory.device import compute_dtype
from cortex.neuron.engine.memory.dtypes import likely_multiplies_codes
from cortex.neuron.kernels.cpu.native import multiplies_codes

from ....waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from ....neuron.fake_hub import FakeHub
    from ...conftest import Start
    from ..conftest import Daemon

pytestmark = pytest.mark.e2e


def pull(daemon: Daemon, model: str, quant: str | None = None) -> dict[str, Any]:
    """The download, when it has ended."""
    status, begun = daemon.call("/files/pull", {"model_id": model, "quant": quant})
    assert status == 202, begun

    def ended() -> dict[str, Any] | None:
        _, pulled = daemon.call(f"/files/pulls/{model}")
        return None if pulled["state"] == "running" else dict(pulled)

    pulled = wait_until(ended, daemon.log.read_text)
    assert pulled is not None
    return pulled


def load(daemon: Daemon, model: str, **options: Any) -> dict[str, Any]:
    status, loaded = daemon.call("/models/load", {"model_id": model, **options})
    assert status == 200, loaded
    daemon.wait_ready(model)
    assert daemon.complete(model)[0] == 200
    return daemon.model(model)


def unload(daemon: Daemon, model: str) -> None:
    assert daemon.call("/models/unload", {"model_id": model})[0] == 200


@pytest.mark.parametrize(
    ("model", "quant", "stored"),
    [
        ("tiny/quants-GGUF", "int8", "q8_0"),
        ("tiny/quants-GGUF", "fp16", None),
        ("tiny/mixed", "int4", "q4_0"),
        ("tiny/split-GGUF", None, "q8_0"),
    ],
)
def test_any_spelling_loads_its_file_and_the_report_names_it(
    daemon: Daemon, model: str, quant: str | None, stored: str | None
) -> None:
    ready = load(daemon, model, quant=quant)
    assert (ready["quant"], ready.get("requested_quant")) == (stored, quant)
    unload(daemon, model)
    assert daemon.call("/files/delete", {"model_id": model})[0] == 200


def test_load_of_another_quantisation_than_the_one_in_memory_is_rejected(daemon: Daemon) -> None:
    request = {"model_id": "tiny/quants-GGUF", "quant": "Q8_0"}
    load(daemon, "tiny/quants-GGUF", quant="Q8_0")
    for same in ("q8", "int8", None):
        assert daemon.call("/models/load", request | {"quant": same})[0] == 200
    status, rejected = daemon.call("/models/load", request | {"quant": "q4"})
    assert (status, rejected["error"]["code"]) == (409, "model_in_use")
    assert "is ready as Q8_0, not as q4; unload it first" in rejected["error"]["message"]
    sleep = {"model_id": "tiny/quants-GGUF", "sleep": True}
    assert daemon.call("/models/unload", sleep)[0] == 200
    assert load(daemon, "tiny/quants-GGUF", quant="q4")["quant"] == "q4_0"
    unload(daemon, "tiny/quants-GGUF")


def test_model_that_does_not_exist_is_listed_until_its_failure_is_cleared(daemon: Daemon) -> None:
    request = {"model_id": "tiny/absent"}
    assert daemon.call("/models/load", request)[1]["error"]["code"] == "source_not_found"
    assert daemon.model("tiny/absent")["state"] == "failed"
    assert daemon.call("/models/unload", request)[0] == 200
    _, listed = daemon.call("/models")
    assert "tiny/absent" not in {model["id"] for model in listed["models"]}
    assert daemon.call("/models/unload", request)[0] == 404


@pytest.fixture
def _quantises_at_load() -> None:
    device = torch.device("cpu")
    if not likely_multiplies_codes() or not multiplies_codes(compute_dtype("auto", device)):
        pytest.skip("this processor multiplies faster with dense weights, so none are quantised at load")


@pytest.mark.usefixtures("_quantises_at_load")
@pytest.mark.parametrize(
    ("model", "source", "quant", "stored"),
    [
        ("tiny/eight", None, "Q4_K_M", "q4_k"),
        ("f16", "tiny/quants-GGUF:F16", "q6k", "q6_k"),
        ("named", "tiny/dense:q5", None, "q5_k"),
    ],
)
def test_dense_weights_are_quantised_at_load_where_no_file_is(
    daemon: Daemon, model: str, source: str | None, quant: str | None, stored: str
) -> None:
    ready = load(daemon, model, source=source, quant=quant)
    assert ready["quant"] == stored
    unload(daemon, model)
    assert daemon.model(model)["least_bytes"] == ready["least_bytes"]
    assert daemon.call("/files/delete", {"model_id": model})[0] == 200


@pytest.mark.usefixtures("_quantises_at_load")
def test_size_of_a_quantised_load_is_known_before_it(daemon: Daemon) -> None:
    assert pull(daemon, "tiny/dense")["state"] == "done"
    sizes = {size["quant"]: size["least_bytes"] for size in daemon.model("tiny/dense")["quantised"]}
    assert pull(daemon, "tiny/dense", "q4")["state"] == "done"
    assert daemon.model("tiny/dense")["least_bytes"] == sizes["q4_k"]
    assert daemon.call("/files/delete", {"model_id": "tiny/dense"})[0] == 200


def test_model_is_loaded_as_it_was_pulled_and_estimated(daemon: Daemon) -> None:
    """Dense weights are next to the pulled GGUF on disk; a load without a quantisation takes what was pulled last."""
    for quant, stored in ((None, None), ("q8", "q8_0"), ("q4", "q4_0"), (None, None)):
        assert pull(daemon, "tiny/mixed", quant)["state"] == "done"
        cold = daemon.model("tiny/mixed")
        assert (cold["state"], cold["quant"]) == ("cold", stored)
        assert load(daemon, "tiny/mixed")["quant"] == stored
        unload(daemon, "tiny/mixed")
    assert pull(daemon, "tiny/mixed", "q4")["state"] == "done"
    status, deleted = daemon.call("/files/delete", {"model_id": "tiny/mixed"})
    assert status == 200, deleted
    assert daemon.call("/models/tiny/mixed")[0] == 404, "all of its files are gone, whatever was pulled last"


def test_pull_of_another_file_leaves_the_report_of_a_loaded_model(daemon: Daemon) -> None:
    load(daemon, "tiny/quants-GGUF", quant="q4")
    assert pull(daemon, "tiny/quants-GGUF", "q8")["state"] == "done"
    assert daemon.model("tiny/quants-GGUF")["quant"] == "q4_0"
    status, error = daemon.call("/files/delete", {"model_id": "tiny/quants-GGUF", "quant": "q4"})
    assert (status, error["error"]["code"]) == (409, "model_in_use")
    assert daemon.call("/files/delete", {"model_id": "tiny/quants-GGUF", "quant": "q8"})[0] == 200
    unload(daemon, "tiny/quants-GGUF")


@pytest.mark.parametrize(
    ("model", "quant", "reason"),
    [
        ("tiny/quants-GGUF", "q6k", "has no q6k; the nearest is tiny/quants-GGUF:Q"),
        ("tiny/eight", "q2", "has no q2, and dense weights cannot be quantised as q2 at load; choose one of q4_k"),
        ("tiny/nothing", "q4", "the hub has no tiny/nothing"),
    ],
)
def test_what_a_repository_cannot_give_is_rejected_and_leaves_no_files(
    daemon: Daemon, model: str, quant: str, reason: str
) -> None:
    before = daemon.call("/health")[1]["disk"]["models_bytes"]
    failed = pull(daemon, model, quant)
    assert (failed["state"], failed["code"]) == ("failed", "source_not_found")
    assert reason in failed["reason"]
    status, error = daemon.call("/models/load", {"model_id": model, "quant": quant})
    assert status >= 400
    assert reason in error["error"]["message"]
    assert daemon.call("/health")[1]["disk"]["models_bytes"] == before


def test_cortex_up_serves_the_quantisation_of_its_option_and_leaves_no_process_when_it_is_killed(
    start: Start, hub: FakeHub, tmp_path: Path
) -> None:
    run = start("tiny/quants-GGUF", "tiny/mixed:int8", "--quant", "q4", HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path))
    run.wait_ready()
    with urllib.request.urlopen(f"{run.url}/v1/models", timeout=WAIT_S) as response:
        listed = json.load(response)["data"]
    assert {entry["id"]: [size["quant"] for size in entry["sizes"]] for entry in listed} == {
        "tiny/quants-GGUF": ["q4_0"],
        "tiny/mixed": ["q8_0"],
    }
    run.stop(signal.SIGKILL)
    run.assert_nothing_left()
