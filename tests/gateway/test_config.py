"""Keys of `cortex.toml` that earlier versions had."""

from pathlib import Path

import pytest

from cortex.gateway.config import GatewaySection, load
from cortex.settings import SettingsError


def test_workers_key_warns_to_run_several_gateways(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cortex.toml"
    file.write_text("[gateway]\nworkers = 4\n")
    assert load(file, {"CORTEX_GATEWAY__WORKERS": "2"}).gateway == GatewaySection()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "gateway.workers" in warning
    assert "has no effect" in warning
    assert "run several gateways" in warning


@pytest.mark.parametrize("text", ["models_config = 'fleet.toml'", "[gateway]\nmodels_config = 'fleet.toml'"])
def test_former_name_of_the_catalogue_works_with_a_notice(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(text)
    assert load(path, {}).gateway.models == Path("fleet.toml")
    assert "models_config" in caplog.text
    assert "rename it" in caplog.text


def test_variables_that_hold_keys_of_nodes_are_no_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text("[[neurons]]\nname = 'beast'\nendpoint = 'http://beast:13131'\nkey_env = 'CORTEX_BEAST_KEY'")
    load(path, {"CORTEX_BEAST_KEY": "x", "CORTEX_URL": "http://elsewhere"})
    with pytest.raises(SettingsError, match="unknown environment variable CORTEX_ATTIC_KEY"):
        load(path, {"CORTEX_ATTIC_KEY": "x"})
