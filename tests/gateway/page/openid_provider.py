"""A small OpenID Connect provider: it signs in whoever comes, as the test says, and checks what the gateway sends."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import time
from typing import Any
from urllib.parse import urlencode

import jwt
from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, SECRET = "cortex", "a secret / with signs"


class OpenIDProvider:
    """One user at a time, with `claims`. `changes` replaces claims of the id token, to make it wrong."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {"sub": "1", "preferred_username": "anna", "groups": []}
        self.changes: dict[str, Any] = {}
        self.signing_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.published_id = "1"
        """The name of the only key that it publishes. Tokens always name `1`."""
        self._published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.signing_key.public_key()))
        self._codes: dict[str, dict[str, str]] = {}
        self.issuer = ""
        self.is_failing_at: str | None = None
        """The path that responds 500."""
        self.hangs_at: str | None = None
        """The path that does not respond until `released`."""
        self.hanging, self.released = asyncio.Event(), asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(middlewares=[self._fail])
        app.add_routes(
            [
                web.get("/realm/.well-known/openid-configuration", self._configuration),
                web.get("/authorize", self._authorize),
                web.post("/token", self._token),
                web.get("/jwks", self._jwks),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._root = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.issuer = f"{self._root}/realm"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _fail(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == self.is_failing_at:
            raise web.HTTPInternalServerError
        if request.path == self.hangs_at:
            self.hanging.set()
            await self.released.wait()
        return await handler(request)

    async def _configuration(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self._root}/authorize",
                "token_endpoint": f"{self._root}/token",
                "jwks_uri": f"{self._root}/jwks",
                "id_token_signing_alg_values_supported": ["RS256", "HS256"],
            }
        )

    async def _jwks(self, request: web.Request) -> web.Response:
        del request
        return web.json_response(
            {"keys": [{**self._published, "kid": self.published_id, "use": "sig", "alg": "RS256"}]}
        )

    async def _authorize(self, request: web.Request) -> web.Response:
        asked = dict(request.query)
        assert (asked["response_type"], asked["client_id"]) == ("code", CLIENT_ID)
        assert asked["code_challenge_method"] == "S256"
        assert "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(8)
        self._codes[code] = asked
        raise web.HTTPFound(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}")

    async def _token(self, request: web.Request) -> web.Response:
        sent = {name: str(value) for name, value in (await request.post()).items()}
        expected = base64.b64encode(f"{CLIENT_ID}:{SECRET}".encode()).decode()
        if request.headers.get("authorization") != f"Basic {expected}":
            return web.json_response({"error": "invalid_client"}, status=401)
        asked = self._codes.pop(sent["code"], None)  # a code is good for one use
        challenge = base64.urlsafe_b64encode(hashlib.sha256(sent["code_verifier"].encode()).digest()).rstrip(b"=")
        if asked is None or asked["code_challenge"] != challenge.decode():
            return web.json_response({"error": "invalid_grant"}, status=400)
        assert sent["redirect_uri"] == asked["redirect_uri"]
        now = int(time.time())
        issued = {"iss": self.issuer, "aud": CLIENT_ID, "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        claims = {**self.claims, **issued, **self.changes}
        token = jwt.encode(claims, self.signing_key, algorithm="RS256", headers={"kid": "1"})
        return web.json_response({"access_token": "x", "token_type": "Bearer", "id_token": token})
