from __future__ import annotations

import msgspec
import pytest

from cortex.gateway.ledger.keys import Keyring, KeySection, as_toml, check_model, generate, tenant_of_key
from cortex.gateway.ledger.users import SignInSection, User
from cortex.settings import Section, SettingsError, loads
from cortex.wire.errors import InvalidAPIKey, ModelNotAllowed


class Config(Section, frozen=True):
    keys: tuple[KeySection, ...] = ()


def test_recognises_a_key_only_by_its_whole_text() -> None:
    alice, bob = generate("alice"), generate("bob")
    ring = Keyring([alice.section, bob.section])
    assert ring.recognise(alice.text) == alice.section
    assert ring.recognise(bob.text) == bob.section
    wrong = [
        "",
        "ck-",
        "sk-something",
        alice.text[:-1],
        alice.text + "x",
        alice.text.replace(alice.section.id, bob.section.id),
        f"ck-{alice.section.id}-",
        alice.section.sha256,
        "é" * 60,
        "\udc80",
    ]
    for text in wrong:
        with pytest.raises(InvalidAPIKey):
            ring.recognise(text)


def test_tenant_is_that_of_the_key_or_of_its_group_or_none() -> None:
    anna, bert, cleo = (generate(name, group=group).section for name, group in (("a", None), ("b", "g"), ("c", "g")))
    dora, emil = (SignInSection().key_of(User(name="same", id=f"openid:{number}")) for number in range(2))
    everybody = (anna, bert, cleo, dora, emil)
    assert len({tenant_of_key(key, "key") for key in everybody}) == 5
    assert len({tenant_of_key(key, "group") for key in everybody}) == 4
    assert tenant_of_key(bert, "group") == tenant_of_key(cleo, "group") != tenant_of_key(anna, "group")
    assert {tenant_of_key(key, "all") for key in everybody} == {tenant_of_key(None, "key")} == {b""}
    renamed = msgspec.structs.replace(anna, name="other", models=("x",))
    assert tenant_of_key(renamed, "key") == tenant_of_key(anna, "key")
    guessed = msgspec.structs.replace(anna, sha256="0" * 64)
    assert tenant_of_key(guessed, "key") != tenant_of_key(anna, "key"), "its public id is not enough"


def test_does_not_store_the_secret() -> None:
    key = generate("alice")
    kept = msgspec.json.encode(key.section).decode()
    assert key.text not in kept
    assert key.text.split("-")[2] not in kept


def test_generates_different_keys() -> None:
    assert len({generate("x").text for _ in range(100)}) == 100


def test_toml_of_a_key_round_trips() -> None:
    keys = [
        generate("plain"),
        generate('odd "name"\n\\', models=("qwen*", "a'b"), requests_per_min=60, window_tokens=10, window_s=3600),
        generate("balance", balance_tokens=0),
        generate("operator", operator=True),
    ]
    text = "\n".join(as_toml(key.section) for key in keys)
    assert "window_s" not in as_toml(keys[0].section)
    assert "operator" not in as_toml(keys[0].section)
    assert "\noperator = true\n" in as_toml(keys[3].section)
    assert loads(Config, text).keys == tuple(key.section for key in keys)


@pytest.mark.parametrize(
    ("patterns", "model", "allowed"),
    [
        ((), "anything", True),
        (("qwen3-4b",), "qwen3-4b", True),
        (("qwen3-4b",), "qwen3-32b", False),
        (("Qwen/*", "tiny"), "Qwen/Qwen3-4B", True),
        (("Qwen/*", "tiny"), "tiny", True),
        (("Qwen/*",), "qwen/x", False),
    ],
)
def test_key_allows_only_its_models(patterns: tuple[str, ...], model: str, allowed: bool) -> None:
    key = generate("alice", models=patterns).section
    if allowed:
        check_model(key, model)
    else:
        with pytest.raises(ModelNotAllowed, match=r"`alice` may not use"):
            check_model(key, model)


def test_rejects_two_keys_with_one_id() -> None:
    key = generate("alice").section
    with pytest.raises(ValueError, match="the same id"):
        Keyring([key, key])


@pytest.mark.parametrize("line", ['id = "short"', 'sha256 = "abc"', "requests_per_min = 0", "window_s = 5"])
def test_rejects_a_damaged_table(line: str) -> None:
    table = as_toml(generate("alice").section).splitlines()
    key = line.split(" ")[0]
    damaged = [one for one in table if not one.startswith(f"{key} ")] + [line]
    with pytest.raises(SettingsError, match=rf"keys\[0\]\.{key}"):
        loads(Config, "\n".join(damaged))
