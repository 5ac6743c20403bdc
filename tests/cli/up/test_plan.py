"""What `cortex up` decides and writes before it starts a process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner

from cortex.cli.cortex import cortex
from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up import run_files
from cortex.cli.up.command import ONE_MACHINE
from cortex.cli.up.plan import distinct, overrides, reachable
from cortex.cli.up.preflight import require_free_ports
from cortex.cli.up.run_files import Ports
from cortex.cli.up.sources import ModelSource
from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.gateway.config import load as load_config
from cortex.neuron.config import NeuronConfig
from cortex.settings import Section, SettingsError, load

from ...ports import free_port

T = TypeVar("T", bound=Section)

PORTS = Ports(gateway=1001, metrics=1002, neuron=1003)
SPECIAL = ModelSource('na"me\\with ünïcode', '/models/back\\slash "quote"\ttab', "Q4_K_M", 0.2)


def reload(tmp_path: Path, text: str, kind: type[T], **env: str) -> T:
    path = tmp_path / "written.toml"
    path.write_text(text, encoding="utf-8")
    return load(kind, path, env_prefix="CORTEX_", env=env)


def test_written_gateway_config_is_valid(tmp_path: Path) -> None:
    config = reload(tmp_path, run_files.gateway_config("::1", PORTS), Config)
    assert (config.gateway.listen.host, config.gateway.listen.port) == ("::1", 1001)
    assert config.neurons[0].endpoint == "http://127.0.0.1:1003"


def test_written_catalogue_escapes_special_characters(tmp_path: Path) -> None:
    catalogue = reload(tmp_path, run_files.catalogue([SPECIAL]), Catalogue)
    model = catalogue.models[0]
    assert ModelSource(model.id, model.source or "", model.quant, model.sampling.temperature) == SPECIAL


def test_written_neuron_config_loads_the_models_at_start(tmp_path: Path) -> None:
    config = reload(tmp_path, run_files.neuron_config(PORTS, [SPECIAL]), NeuronConfig)
    assert config.address == "127.0.0.1:1003"
    model = config.default_models[0]
    assert ModelSource(model.id, model.source or "", model.quant, model.sampling.temperature) == SPECIAL


OWN = """
[gateway]
listen = "0.0.0.0:9999"
[[neurons]]
name = "local"
endpoint = "http://beast.internal:13131"
"""


def test_user_config_gets_the_local_node_and_the_requested_ports(tmp_path: Path) -> None:
    environment = overrides(reload(tmp_path, OWN, Config), "127.0.0.1", PORTS)
    gateway = {name: value for name, value in environment.items() if name.startswith("CORTEX_")}
    config = reload(tmp_path, OWN, Config, **gateway)
    assert config.gateway.listen == "127.0.0.1:1001"
    assert [neuron.name for neuron in config.neurons] == ["local", "local-2"]
    assert config.neurons[1].endpoint == "http://127.0.0.1:1003"


@pytest.mark.parametrize(
    ("host", "is_host_named", "is_open"),
    [("127.0.0.1", True, False), ("::1", True, False), ("0.0.0.0", True, True), ("0.0.0.0", False, False)],
)
def test_only_an_address_of_the_command_line_is_open_until_there_are_keys(
    host: str, is_host_named: bool, is_open: bool
) -> None:
    environment = overrides(Config(), host, PORTS, is_host_named=is_host_named)
    assert [name for name in environment if "OPEN" in name] == ["CORTEX_GATEWAY__OPEN_UNTIL_KEYS"] * is_open


@pytest.mark.parametrize(
    ("text", "env", "listen"),
    [
        ("", {}, "127.0.0.1:31313"),
        ("[gateway]\naccess_log = true\n", {}, "127.0.0.1:31313"),
        ('[gateway]\nlisten = "0.0.0.0:9999"\n', {}, "0.0.0.0:9999"),
        ("", {"CORTEX_GATEWAY__LISTEN": "10.0.0.5:1"}, "10.0.0.5:1"),
    ],
)
def test_listens_on_loopback_unless_an_address_is_configured(
    tmp_path: Path, text: str, env: dict[str, str], listen: str
) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text(text)
    assert load_config(path, env, defaults=ONE_MACHINE).gateway.listen == listen
    assert load_config(path, {}).gateway.access_log is ("access_log" in text)


def test_error_names_a_section_that_is_not_a_table_despite_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cortex.toml"
    path.write_text("gateway = 3\n")
    with pytest.raises(SettingsError, match="gateway"):
        load_config(path, {}, defaults=ONE_MACHINE)


def test_config_without_nodes_gets_the_local_node(tmp_path: Path) -> None:
    settings = reload(tmp_path, '[gateway]\nlisten = "0.0.0.0:9999"\n', Config)
    assert overrides(settings, "127.0.0.1", PORTS)["CORTEX_NEURONS__0__NAME"] == "local"


def test_config_with_the_local_node_gets_no_second_one(tmp_path: Path) -> None:
    text = '[[neurons]]\nname = "here"\nendpoint = "http://localhost:1003"\n'
    assert not [name for name in overrides(reload(tmp_path, text, Config), "127.0.0.1", PORTS) if "NEURONS" in name]


@pytest.mark.parametrize("text", ["", '[[neurons]]\nname = "here"\nendpoint = "http://localhost:1003"\n', OWN])
def test_gateway_gets_the_key_of_the_local_node(tmp_path: Path, text: str) -> None:
    environment = overrides(reload(tmp_path, text, Config), "127.0.0.1", PORTS, "nk-0123456789abcdef")
    gateway = {name: value for name, value in environment.items() if name.startswith("CORTEX_")}
    config = reload(tmp_path, text, Config, **gateway)
    (local,) = (neuron for neuron in config.neurons if ":1003" in neuron.endpoint)
    assert environment[config.key_variable(local) or ""] == "nk-0123456789abcdef"


def test_written_config_gets_no_second_local_node(tmp_path: Path) -> None:
    settings = reload(tmp_path, run_files.gateway_config("127.0.0.1", PORTS), Config)
    assert not [name for name in overrides(settings, "127.0.0.1", PORTS) if "NEURONS" in name]


def test_wildcard_listener_is_reachable_through_loopback() -> None:
    assert [reachable(host) for host in ("0.0.0.0", "::", "10.0.0.5")] == ["127.0.0.1", "::1", "10.0.0.5"]


def test_rejects_two_files_of_one_name_but_not_a_repetition() -> None:
    assert distinct([SPECIAL, SPECIAL]) == (SPECIAL,)
    with pytest.raises(CommandError, match="have the same name"):
        distinct([ModelSource("a", "/x/a.gguf"), ModelSource("a", "/y/a.gguf")])


def test_equal_ports_are_a_usage_error() -> None:
    with pytest.raises(CommandError) as failure:
        require_free_ports("127.0.0.1", Ports(5001, 5001, 5002))
    assert failure.value.exit_code is ExitCode.USAGE


def test_rejects_an_address_of_another_machine() -> None:
    with pytest.raises(CommandError, match=r"192\.0\.2\.1"):
        require_free_ports("192.0.2.1", Ports(5001, 5002, 5003))


def test_rejects_a_host_name_without_an_address() -> None:
    with pytest.raises(CommandError, match="not an address of this machine") as failure:
        require_free_ports("no-such-name.invalid", Ports(5001, 5002, 5003))
    assert failure.value.exit_code is ExitCode.USAGE


def test_error_of_a_taken_port_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match="--neuron-port") as failure:
            require_free_ports("127.0.0.1", Ports(free_port(), free_port(), port))
    assert failure.value.exit_code is ExitCode.NO_ROOM


def test_metrics_stay_on_their_own_host_whatever_that_of_the_api(tmp_path: Path) -> None:
    name = "CORTEX_GATEWAY__METRICS_LISTEN"
    assert overrides(Config(), "0.0.0.0", PORTS)[name] == "127.0.0.1:1002"
    assert reload(tmp_path, run_files.gateway_config("0.0.0.0", PORTS), Config).gateway.metrics_listen == (
        "127.0.0.1:1002"
    )
    named = reload(tmp_path, '[gateway]\nmetrics_listen = "10.0.0.1:9"\n', Config)
    assert overrides(named, "127.0.0.1", PORTS)[name] == "10.0.0.1:1002"


def test_quantisation_of_no_model_is_a_usage_error() -> None:
    found = CliRunner().invoke(cortex, ["up", "--quant", "q4"])
    assert (found.exit_code, "--quant needs a MODEL" in found.stderr) == (2, True)


def test_ollamas_port_is_an_option_of_both_programs() -> None:
    ports = Ports(gateway=1001, metrics=1002, neuron=1003, ollama=11434)
    assert overrides(Config(), "0.0.0.0", ports)["CORTEX_GATEWAY__OLLAMA_LISTEN"] == "0.0.0.0:11434"
    assert "CORTEX_GATEWAY__OLLAMA_LISTEN" not in overrides(Config(), "0.0.0.0", PORTS)


def test_a_taken_port_of_ollama_says_what_to_leave_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway, metrics, neuron = (free_port() for _ in range(3))
        ports = Ports(gateway, metrics, neuron, ollama=taken.getsockname()[1])
        with pytest.raises(CommandError) as caught:
            require_free_ports("127.0.0.1", ports)
    assert "leave out --ollama" in caught.value.remedy
