from __future__ import annotations

from typing import Any

import pytest

from cortex.neuron.hub_process.resolver import Offer, OfferRequest, Variant
from cortex.neuron.weights.errors import Cancelled, FilesMissing, HubUnreachable, NotOnHub

COMMIT = "c0ffee" + "0" * 34


def test_offer_has_every_quantisation_with_its_size_and_downloads_nothing(start_hub: Any) -> None:
    files = {
        "README.md": b"words", "config.json": b"{}", "model.safetensors": b"w" * 900, "mmproj-f16.gguf": b"p" * 50,
        "m-Q4_K_M.gguf": b"q" * 300, "m-Q8_0-00001-of-00002.gguf": b"a" * 400, "m-Q8_0-00002-of-00002.gguf": b"b" * 100,
    }  # fmt: skip
    hub = start_hub(files)
    offer = OfferRequest("org/model@main:Q8_0", {"HF_ENDPOINT": hub.endpoint}).read()
    assert offer == Offer(
        "org/model", COMMIT, (Variant("Q4_K_M", 350, 2), Variant("Q8_0", 550, 3), Variant(None, 902, 2))
    )
    assert hub.contents_requests() == []


def test_offer_of_a_repository_without_weights_is_rejected(start_hub: Any) -> None:
    hub = start_hub({"README.md": b"words"})
    with pytest.raises(NotOnHub, match="neither safetensors nor GGUF"):
        OfferRequest("org/model", {"HF_ENDPOINT": hub.endpoint}).read()


@pytest.mark.parametrize(
    ("source", "environment", "error", "message"),
    [
        ("org/model", {"HF_HUB_OFFLINE": "1"}, HubUnreachable, "the node is offline"),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, HubUnreachable, "check the network or HF_ENDPOINT"),
        ("not a name", {}, FilesMissing, "owner/name on the hub"),
        ("/", {}, NotOnHub, "is a path on this node"),
    ],
)
def test_error_says_why_the_hub_was_not_asked(
    source: str, environment: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OfferRequest(source, environment).read()


def test_aborted_request_ends_with_cancelled(start_hub: Any) -> None:
    request = OfferRequest("org/model", {"HF_ENDPOINT": start_hub({}).endpoint})
    request.abort()
    with pytest.raises(Cancelled):
        request.read()
