"""The `config.json` files of published models, with all that their makers write into them.

`published_configs.jsonl` has one model in each line, with the billions of weights that it is published with (heads that
predict further tokens not counted).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage, weight_bytes

ROWS = [json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_published_config_describes_a_model_of_its_published_size(row: dict[str, Any]) -> None:
    architecture = read_architecture(row["config"])
    assert architecture.backend == "native"
    billions = weight_bytes(architecture, WeightStorage(2)) / 2e9
    assert billions == pytest.approx(row["billions"], rel=1e-3)  # norms are in 32 bits
    text = row["config"].get("text_config", row["config"])
    assert architecture.config.context_tokens == text.get("max_position_embeddings", 131_072)
    windows = {text.get("sliding_window")} if text.get("use_sliding_window", True) else {None}
    assert set(architecture.windows) <= {None, *windows}
