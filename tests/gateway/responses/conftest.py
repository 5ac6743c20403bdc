"""The databases that stored responses may use, and a node that makes responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from .responding_node import node

__all__ = ["node"]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "state" / "responses.db")
    url: str = request.getfixturevalue("postgres_url")
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        tables = "response, background_run, conversation, conversation_item, conversation_response"
        connection.execute(f"DROP TABLE IF EXISTS {tables}")
    return url
