"""Tenants: every part counts, and none can be taken for another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.fields.body import Fields
from cortex.wire.tenant import EVERYBODY, read_tenant, tenant_of

PARTS = st.lists(st.binary(max_size=20), max_size=3)


@given(PARTS, PARTS)
def test_different_parts_make_different_tenants(first: list[bytes], second: list[bytes]) -> None:
    is_same = first == second or not (any(first) or any(second))
    assert (tenant_of(*first) == tenant_of(*second)) == is_same
    assert len(tenant_of(*first)) == (16 if any(first) else 0)


def test_salt_makes_a_tenant_unless_it_is_empty() -> None:
    tenants = [read_tenant(Fields({"cache_salt": salt}, "")) for salt in ("a", "b", "\udc00", "", None)]
    assert len(set(tenants[:3])) == 3
    assert tenants[3:] == [EVERYBODY, EVERYBODY]
