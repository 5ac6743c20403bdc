"""What people who sign in without a key may do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cortex.gateway.config import Config
from cortex.gateway.database import Database
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import Keyring, check_model, generate
from cortex.gateway.ledger.meter import KeyedMeter, Metering
from cortex.gateway.ledger.sessions import Sessions
from cortex.gateway.ledger.users import SignInSection, User, openid_id
from cortex.wire.errors import InvalidAPIKey, ModelNotAllowed

from .metered_requests import limited, opened, request

ANNA = User(name="anna", id=openid_id("https://login.example", "1"))


async def test_tighter_sign_in_holds_for_users_who_have_an_account(tmp_path: Path) -> None:
    ledger, _ = await opened(f"{tmp_path}/spend.db")

    def admitted(section: SignInSection) -> None:
        reservation = KeyedMeter(ledger).admit(section.key_of(ANNA), 400, limited(100))
        try:
            assert reservation.key is not None
            check_model(reservation.key, "large")
        finally:
            reservation.cancel()

    admitted(SignInSection())
    with pytest.raises(ModelNotAllowed, match="only `small`"):
        admitted(SignInSection(models=("small",)))
    admitted(SignInSection(models=("*",)))
    await ledger.close()


async def test_request_that_began_before_a_reload_does_not_bring_the_old_key_back(tmp_path: Path) -> None:
    key = generate("alice", models=("small",))
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    reservation = meter.admit(replace(key.section, models=()), 400, limited(100))
    assert reservation.key is not None
    with pytest.raises(ModelNotAllowed):
        check_model(reservation.key, "large")
    reservation.cancel()
    await ledger.close()


@pytest.mark.parametrize(("own", "allowed"), [((), ("small",)), (("large",), ("large",))])
async def test_users_have_the_models_of_their_group_unless_they_have_their_own(
    tmp_path: Path, own: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    section = SignInSection(proxy_addresses=("127.0.0.1",), models=own, group="lab")
    metering = Metering(tmp_path, Database(Config().database(tmp_path)))
    await metering.use(Config(groups=(GroupSection(name="lab", models=("small",)),), sign_in=section))
    key = metering.meter.key(request((b"x-forwarded-user", b"anna"), (b"x-cortex-page", b"1")))
    assert key is not None
    assert key.models == allowed
    await metering.close()


def test_users_are_known_by_what_they_cannot_change() -> None:
    section = SignInSection(proxy_addresses=("127.0.0.1",))
    renamed = replace(ANNA, name="boss")
    other = replace(ANNA, id=openid_id("https://login.example", "2"))
    elsewhere = replace(ANNA, id=openid_id("https://other.example", "1"))
    assert section.key_of(renamed).id == section.key_of(ANNA).id
    assert section.key_of(renamed).name == "boss"
    proxied = [section.proxied(request((b"x-forwarded-user", name.encode()))) for name in ("anna", ANNA.id)]
    assert all(proxied)
    ids = {section.key_of(user).id for user in (ANNA, other, elsewhere, *filter(None, proxied))}
    assert len(ids) == 5, "all are different people"


def test_session_of_a_version_without_ids_has_ended(tmp_path: Path) -> None:
    class _UserSession(msgspec.Struct, frozen=True):
        user: dict[str, str]
        expires: int

    sessions = Sessions(tmp_path)
    section = SignInSection(issuer="https://login.example", client_id="c", public_url="https://cortex.example")

    def recognised(session: str) -> str:
        sent = request((b"cookie", b"cortex_session=" + session.encode()), (b"x-cortex-page", b"1"))
        return sessions.recognise(Keyring(()), sent, section).id

    assert recognised(sessions.issue_user(ANNA)) == section.key_of(ANNA).id
    with pytest.raises(InvalidAPIKey):
        recognised(sessions.sealed(_UserSession({"name": "anna"}, 2**40)))
