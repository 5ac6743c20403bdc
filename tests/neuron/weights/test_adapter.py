from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.weights.adapter import adapter_folder, adapter_scale
from cortex.neuron.weights.errors import CheckpointError

JINA = {"model_type": "jina_embeddings_v5"}


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"r": 32, "lora_alpha": 32}, 1.0),
        ({"r": 4, "lora_alpha": 8, "bias": "none", "rank_pattern": {}, "use_dora": False}, 2.0),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True}, 2.0),
    ],
)
def test_scale_follows_from_rank_and_alpha(options: dict[str, Any], scale: float, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    assert adapter_scale(tmp_path) == scale


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_alpha": 8}, "rank None"),
        ({"r": 0, "lora_alpha": 8}, "rank 0"),
        ({"r": 4, "lora_alpha": "8"}, "lora_alpha 8"),
        ({"r": 4, "lora_alpha": 8, "use_dora": True}, "use_dora"),
        ({"r": 4, "lora_alpha": 8, "bias": "all"}, "bias"),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_other_kinds_of_adapters_are_rejected(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    with pytest.raises(CheckpointError, match=reason):
        adapter_scale(tmp_path)


def test_folder_is_only_that_of_models_with_adapters_and_no_link(tmp_path: Path) -> None:
    assert adapter_folder(tmp_path, JINA) is None
    (tmp_path / "adapters" / "retrieval").mkdir(parents=True)
    assert adapter_folder(tmp_path, {"model_type": "qwen3"}) is None
    assert adapter_folder(tmp_path, JINA) == tmp_path / "adapters" / "retrieval"
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapters").symlink_to(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="link"):
        adapter_folder(other, JINA)
