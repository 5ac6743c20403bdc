"""A hub's listing: values of a wrong type are errors that name their place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.neuron.weights.errors import HubError
from cortex.neuron.weights.hub.listing import RemoteFile, parse_listing

FILE = {"rfilename": "config.json", "blobId": "a" * 40, "size": 3}
LARGE = {"rfilename": "w.gguf", "lfs": {"sha256": "b" * 64, "size": 5}}


def listing(**fields: Any) -> bytes:
    return msgspec.json.encode({"sha": "c" * 40, "siblings": [FILE, LARGE], "more": 1} | fields)


def test_files_of_both_kinds() -> None:
    files = parse_listing(listing(), "https://hub").files
    assert files["config.json"] == RemoteFile("config.json", 3, "a" * 40)
    assert files["w.gguf"] == RemoteFile("w.gguf", 5, "b" * 64)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sha": 5}, "sha is int, not str"),
        ({"siblings": None}, "siblings is NoneType, not list"),
        ({"siblings": "text"}, "siblings is str, not list"),
        ({"siblings": [FILE, 5]}, r"siblings\[1\] is no object"),
        ({"siblings": [FILE | {"rfilename": ["x"]}]}, r"siblings\[0\]\.rfilename is list"),
        ({"siblings": [FILE | {"size": "3"}]}, r"siblings\[0\]\.size is str"),
        ({"siblings": [FILE | {"size": True}]}, r"siblings\[0\]\.size is bool"),
        ({"siblings": [FILE | {"size": -1}]}, "the size -1 of 'config.json'"),
        ({"siblings": [FILE | {"blobId": None}]}, r"siblings\[0\]\.blobId is NoneType"),
        ({"siblings": [LARGE | {"lfs": True}]}, r"siblings\[0\]\.lfs is no object"),
        ({"siblings": [LARGE | {"lfs": {"sha256": 1, "size": 5}}]}, r"siblings\[0\]\.lfs\.sha256 is int"),
    ],
)
def test_a_wrong_type_is_a_clear_error(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(HubError, match=f"https://hub did not respond like a hub .*{problem}.*check HF_ENDPOINT"):
        parse_listing(listing(**fields), "https://hub")
