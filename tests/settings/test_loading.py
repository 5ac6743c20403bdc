from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.settings import Listen, Section, SettingsError, load, loads


class Gateway(Section):
    listen: Listen = Listen("127.0.0.1:31313")
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    data_dir: Path | None = None
    title: str = "fleet"
    debug: bool = False
    timeout_s: float = 30.0


class Eviction(Section):
    strategy: Literal["lru", "priority"] = "lru"


class Neuron(Section):
    name: str
    endpoint: str
    tags: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("that name is taken")


class Config(Section):
    gateway: Gateway = Gateway()
    eviction: Eviction = Eviction()
    neurons: tuple[Neuron, ...] = ()
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    level: int = 0


def refuse(text: str, env: dict[str, str] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        loads(Config, text, file=Path("cortex.toml"), env_prefix="CORTEX_", env=env or {})
    assert "\n" not in caught.value.message
    return caught.value


def test_nothing_at_all_gives_the_defaults() -> None:
    assert load(Config, None, env_prefix="CORTEX_", env={}) == Config()


def test_a_file_is_read_into_typed_values(tmp_path: Path) -> None:
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
            "wrong value for gateway.workers in cortex.toml line 3: expected `int`, got `str`",
        ),
        (
            "gateway.workers = 0",
            "wrong value for gateway.workers in cortex.toml line 1: expected `int` >= 1",
        ),
        (
            "[eviction]\nstrategy = 'prio'",
            "wrong value for eviction.strategy in cortex.toml line 2: got `prio`, did you mean `priority`?",
        ),
        (
            "[eviction]\nstrategy = 'x'",
            "wrong value for eviction.strategy in cortex.toml line 2: got `x`, expected one of `lru`, `priority`",
        ),
        (
            "[[neurons]]\nname = 'a'",
            "missing key neurons[0].endpoint in cortex.toml line 1: expected text",
        ),
        (
            "[[neurons]]\nname='forbidden'\nendpoint='b'",
            "wrong value for neurons[0] in cortex.toml line 1: that name is taken",
        ),
        (
            "[gateway]\nlisten = '31313'",
            "wrong value for gateway.listen in cortex.toml line 2: "
            "expected `host:port`, such as `127.0.0.1:31313`, got `31313`",
        ),
        (
            "[gateway]\nlisten = 31313",
            "wrong value for gateway.listen in cortex.toml line 2: expected a string, got `int`",
        ),
        (
            "[aliases]\na = 'x'\nb = 3",
            "wrong value for aliases.b in cortex.toml line 3: expected `str`, got `int`",
        ),
        (
            "[[neurons]]\nname='a'\nendpoint='b'\n[neurons.tags]\nx = 1\ny = 'no'",
            "wrong value for neurons[0].tags.y in cortex.toml line 6: expected `int`, got `str`",
        ),
        (
            "gateway = 3",
            "wrong value for gateway in cortex.toml line 1: expected `object`, got `int`",
        ),
    ],
)
def test_a_refusal_names_file_line_key_and_remedy(text: str, message: str) -> None:
    assert refuse(text).message == message


def test_a_refusal_carries_its_facts() -> None:
    error = refuse("[gateway]\nlistn = 1")
    assert (error.key, error.file, error.line, error.variable) == ("gateway.listn", Path("cortex.toml"), 2, None)


def test_broken_toml_names_the_line() -> None:
    assert refuse("[gateway]\nlisten 3").message.startswith("cortex.toml line 2: not valid TOML: ")
    assert refuse("[gateway]\nlisten =").line == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config file at .*absent\.toml"):
        load(Config, tmp_path / "absent.toml", env_prefix="CORTEX_", env={})
    with pytest.raises(SettingsError, match="cannot read config file"):
        load(Config, tmp_path, env_prefix="CORTEX_", env={})
    (tmp_path / "latin.toml").write_bytes(b"level = 1\n# caf\xe9\n")
    with pytest.raises(SettingsError, match="line 2: not UTF-8"):
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
def test_the_environment_overrides_with_typed_values(env: dict[str, str], expected: Config) -> None:
    assert loads(Config, "", env_prefix="CORTEX_", env=env) == expected


def test_the_environment_wins_over_the_file() -> None:
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
            {"CORTEX_GATEWAY__WORKERS": "many"},
            "wrong value for gateway.workers in environment variable CORTEX_GATEWAY__WORKERS: "
            "expected `int`, got `str`",
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
def test_a_refused_variable_is_named(env: dict[str, str], message: str) -> None:
    assert refuse("", env).message == message


keys = st.sampled_from(
    [
        "gateway",
        "listen",
        "workers",
        "eviction",
        "strategy",
        "neurons",
        "name",
        "tags",
        "aliases",
        "level",
        '"a\\nb"',
        "x",
    ]
)
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


@given(st.lists(lines, max_size=8).map("\n".join), variables)
def test_any_text_and_environment_gives_a_config_or_one_clear_line(text: str, env: dict[str, str]) -> None:
    try:
        config = loads(Config, text, file=Path("cortex.toml"), env_prefix="C_", env=env)
    except SettingsError as error:
        assert error.message.splitlines() == [error.message]  # noqa: PT017
    else:
        assert isinstance(config, Config)
