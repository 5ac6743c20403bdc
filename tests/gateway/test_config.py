"""Keys of `cortex.toml` that earlier versions had."""

from pathlib import Path

import pytest

from cortex.gateway.config import GatewaySection, load


def test_workers_key_warns_to_run_several_gateways(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cortex.toml"
    file.write_text("[gateway]\nworkers = 4\n")
    assert load(file, {"CORTEX_GATEWAY__WORKERS": "2"}).gateway == GatewaySection()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "gateway.workers" in warning
    assert "has no effect" in warning
    assert "run several gateways" in warning
