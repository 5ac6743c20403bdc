from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.settings import Listen, SettingsError, check_variables, load, loads

from ..examples import MANY
from .example_config import Config, Eviction, Gateway, Neuron, load_error


def test_no_file_and_no_environment_gives_the_defaults() -> None:
    assert load(Config, None, env_prefix="CORTEX_", env={}) == Config()


def test_reads_file_into_typed_values(tmp_path: Path) -> None:
    file = tmp_path / "cortex.toml"
    file.write_text(
        '[gateway]\nlisten = "[::1]:80"\ndata_dir = "~/x"\ntimeout_s = 3\n[[neurons]]\nname="a"\nendpoint="http://a"'
    )
    config = load(Config, file, env_prefix="CORTEX_", env={})
    assert config.gateway.listen.host == "::1"
    assert config.gateway.data_dir == Path("~/x").expanduser()
    assert config.gateway.timeout_s == 3.0
    assert config.neurons == (Neuron(name="a", endpoint="http://a"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[gateway]\n# c\nlistn = 'x'",
            "unknown key gateway.listn in cortex.toml line 3: did you mean `listen`?",
        ),
        (
            "[eviction]\nzzzzzz = 1",
            "unknown key eviction.zzzzzz in cortex.toml line 2: known here are `strategy`",
        ),
        (
            "[gatway]\n",
            "unknown key gatway in cortex.toml line 1: did you mean `gateway`?",
        ),
        (
            "[[neurons]]\nname='a'\nendpoint='b'\n[[neurons]]\nname='b'\nendpoint='c'\nport=3",
            "unknown key neurons[1].port in cortex.toml line 7: known here are `name`, `endpoint`, `tags`",
        ),
        (
            "\n[gateway]\nworkers = 'two'",
            'invalid value for gateway.workers in cortex.toml line 3: expected whole number ≥ 1, got "two"',
        ),
        (
            "gateway.workers = 0",
            "invalid value for gateway.workers in cortex.toml line 1: expected whole number ≥ 1, got 0",
        ),
        (
            "[eviction]\nstrategy = 'prio'",
            "invalid value for eviction.strategy in cortex.toml line 2: got `prio`, did you mean `priority`?",
        ),
        (
            "[eviction]\nstrategy = 'x'",
            "invalid value for eviction.strategy in cortex.toml line 2: got `x`, expected one of `lru`, `priority`",
        ),
        (
            "[[neurons]]\nname = 'a'",
            "missing key neurons[0].endpoint in cortex.toml line 1: expected text",
        ),
        (
            "[[neurons]]\nname='forbidden'\nendpoint='b'",
            "invalid value for neurons[0] in cortex.toml line 1: this name is reserved",
        ),
        (
            "[gateway]\nlisten = '31313'",
            "invalid value for gateway.listen in cortex.toml line 2: "
            "expected `host:port`, such as `127.0.0.1:31313`, got `31313`",
        ),
        (
            "[gateway]\nlisten = 31313",
            "invalid value for gateway.listen in cortex.toml line 2: expected host:port, got 31313",
        ),
        (
            "[aliases]\na = 'x'\nb = 3",
            "invalid value for aliases.b in cortex.toml line 3: expected text, got 3",
        ),
        (
            "[[neurons]]\nname='a'\nendpoint='b'\n[neurons.tags]\nx = 1\ny = 'no'",
            'invalid value for neurons[0].tags.y in cortex.toml line 6: expected whole number, got "no"',
        ),
        (
            "level = 13",
            "invalid configuration in cortex.toml: level 13 does not exist; choose another",
        ),
        (
            "[gateway]\ntimeout_s = " + "9" * 400,
            "invalid value for gateway.timeout_s in cortex.toml line 2: int too large to convert to float",
        ),
        (
            "[gateway]\ntitle = 2020-01-01",
            'invalid value for gateway.title in cortex.toml line 2: expected text, got "2020-01-01"',
        ),
        (
            "[gateway]\ndata_dir = '~no-such-user/x'",
            "invalid value for gateway.data_dir in cortex.toml line 2: Could not determine home directory.",
        ),
        (
            "gateway = 3",
            "invalid value for gateway in cortex.toml line 1: expected table, got 3",
        ),
    ],
)
def test_error_names_file_line_key_and_remedy(text: str, message: str) -> None:
    assert load_error(text).message == message


def test_error_of_broken_toml_names_file_and_line() -> None:
    message = load_error("[gateway]\nlisten 3").message
    assert message.startswith("cortex.toml is not valid TOML: ")
    assert "line 2" in message


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config file at .*absent\.toml"):
        load(Config, tmp_path / "absent.toml", env_prefix="CORTEX_", env={})
    with pytest.raises(SettingsError, match="cannot read config file"):
        load(Config, tmp_path, env_prefix="CORTEX_", env={})
    (tmp_path / "latin.toml").write_bytes(b"level = 1\n# caf\xe9\n")
    with pytest.raises(SettingsError, match="line 2 is not UTF-8"):
        load(Config, tmp_path / "latin.toml", env_prefix="CORTEX_", env={})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"CORTEX_GATEWAY__LISTEN": "0.0.0.0:1"}, Config(gateway=Gateway(listen=Listen("0.0.0.0:1")))),
        ({"CORTEX_GATEWAY__WORKERS": "4"}, Config(gateway=Gateway(workers=4))),
        ({"CORTEX_GATEWAY__TITLE": "42"}, Config(gateway=Gateway(title="42"))),
        ({"CORTEX_GATEWAY__TITLE": '"quoted"'}, Config(gateway=Gateway(title="quoted"))),
        ({"CORTEX_GATEWAY__DEBUG": "true"}, Config(gateway=Gateway(debug=True))),
        ({"CORTEX_EVICTION__STRATEGY": "priority"}, Config(eviction=Eviction(strategy="priority"))),
        ({"CORTEX_LEVEL": "7"}, Config(level=7)),
        ({"CORTEX_URL": "http://x", "CORTEX_": "", "OTHER_LEVEL": "3"}, Config()),
        (
            {"CORTEX_NEURONS": '[{name="a", endpoint="b"}]', "CORTEX_NEURONS__0__NAME": "c"},
            Config(neurons=(Neuron(name="c", endpoint="b"),)),
        ),
        (
            {"CORTEX_NEURONS__0__NAME": "a", "CORTEX_NEURONS__0__ENDPOINT": "b"},
            Config(neurons=(Neuron(name="a", endpoint="b"),)),
        ),
        ({"CORTEX_ALIASES": '{"claude-*" = "x"}'}, Config(aliases={"claude-*": "x"})),
    ],
)
def test_environment_overrides_with_typed_values(env: dict[str, str], expected: Config) -> None:
    assert loads(Config, "", env_prefix="CORTEX_", env=env) == expected


def test_environment_takes_precedence_over_file() -> None:
    config = loads(
        Config, "[gateway]\nworkers = 2\ntitle = 'a'", env_prefix="CORTEX", env={"CORTEX_GATEWAY__WORKERS": "3"}
    )
    assert config.gateway == Gateway(workers=3, title="a")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"CORTEX_GATEWAY__LISTN": "x"},
            "unknown key gateway.listn in environment variable CORTEX_GATEWAY__LISTN: did you mean `listen`?",
        ),
        (
            {"CORTEX_GATWAY__LISTEN": "x"},
            "unknown key gatway in environment variable CORTEX_GATWAY__LISTEN: did you mean `gateway`?",
        ),
        (
            {"CORTEX_GATEWAY__WORKERS": "many"},
            "invalid value for gateway.workers in environment variable CORTEX_GATEWAY__WORKERS: "
            'expected whole number ≥ 1, got "many"',
        ),
        (
            {"CORTEX_NEURONS__2__NAME": "x"},
            "wrong index in environment variable CORTEX_NEURONS__2__NAME: the list has 0 elements so far",
        ),
        (
            {"CORTEX_LEVEL__DEEP": "x", "CORTEX_LEVEL": "1"},
            "cannot set level.deep by environment variable CORTEX_LEVEL__DEEP: another kind of value is there",
        ),
    ],
)
def test_error_names_the_environment_variable(env: dict[str, str], message: str) -> None:
    assert load_error("", env).message == message


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("CORTEX_GATEWAY_LISTEN", "did you mean CORTEX_GATEWAY__LISTEN?"),
        ("CORTEX_LEVL", "did you mean CORTEX_LEVEL?"),
        ("CORTEX_URI", "did you mean CORTEX_URL?"),
        ("CORTEX_PORT", "variables that begin with CORTEX_ are keys; rename or unset it"),
        ("CORTEX_QQQQQQQQQQQQ", "variables that begin with CORTEX_ are keys; rename or unset it"),
    ],
)
def test_rejects_unknown_environment_variable_with_the_prefix(variable: str, advice: str) -> None:
    assert load_error("", {variable: "1"}).message == f"unknown environment variable {variable}: {advice}"


def test_accepts_environment_variables_that_are_no_keys() -> None:
    assert loads(Config, "", env_prefix="CORTEX_", env={"CORTEX_URL": "x", "OTHER": "y"}) == Config()


SERVICE_LINKS = {
    "CORTEX_SERVICE_HOST": "10.0.0.1",
    "CORTEX_SERVICE_PORT": "80",
    "CORTEX_SERVICE_PORT_HTTP": "80",
    "CORTEX_PORT": "tcp://10.0.0.1:80",
    "CORTEX_PORT_80_TCP": "tcp://10.0.0.1:80",
    "CORTEX_PORT_80_TCP_PROTO": "tcp",
    "CORTEX_PORT_80_TCP_PORT": "80",
    "CORTEX_PORT_80_TCP_ADDR": "10.0.0.1",
}
"""What Kubernetes sets for a service `cortex`."""


@pytest.mark.parametrize("service", ["CORTEX", "CORTEX_SERVICE", "CORTEX_LEVEL"])
def test_variables_of_kubernetes_services_are_not_keys(service: str) -> None:
    links = {f"{service}{name.removeprefix('CORTEX')}": value for name, value in SERVICE_LINKS.items()}
    assert loads(Config, "", env_prefix="CORTEX_", env=links) == Config()
    check_variables(Config, "CORTEX_", links, frozenset())
    del links[f"{service}_SERVICE_HOST"]
    with pytest.raises(SettingsError, match="unknown environment variable"):
        check_variables(Config, "CORTEX_", links, frozenset())


KEYS = """
gateway listen workers eviction strategy neurons name tags aliases level timeouts idle_s retries x
"""
keys = st.sampled_from([*KEYS.split(), '"a\\nb"'])
values = st.recursive(
    st.sampled_from(["1", "-0.5", "true", '"text"', '"""two\nlines"""', "1979-05-27", '"0.0.0.0:1"', "'lru'"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(keys, inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        )
    ),
    max_leaves=6,
)
lines = st.one_of(
    st.tuples(keys, values).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    keys.map(lambda key: f"[{key}]"),
    keys.map(lambda key: f"[[{key}]]"),
    st.text(max_size=20),
)
variables = st.dictionaries(
    st.lists(keys.map(str.upper) | st.sampled_from(["0", "1", ""]), max_size=3).map(
        lambda parts: "C_" + "__".join(parts)
    ),
    values | st.text(max_size=10),
    max_size=3,
)


@MANY
@given(st.lists(lines, max_size=8).map("\n".join), variables)
def test_arbitrary_input_gives_a_config_or_a_one_line_error(text: str, env: dict[str, str]) -> None:
    try:
        config = loads(Config, text, file=Path("cortex.toml"), env_prefix="C_", env=env)
    except SettingsError as error:
        assert error.message.splitlines() == [error.message]  # noqa: PT017
    else:
        assert isinstance(config, Config)
