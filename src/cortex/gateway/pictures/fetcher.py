"""Fetches pictures from addresses that clients send."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urljoin
from weakref import WeakValueDictionary

from cortex.gateway.config import PicturesSection
from cortex.gateway.pictures.addresses import ForbiddenAddress, PictureAddress, chosen, read_address
from cortex.http.limits import Buffered, UpstreamLimits
from cortex.http.server.spool import no_room
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import ResponseTooLarge, UpstreamFault
from cortex.http.upstream.pool import Pool, UpstreamResponse

Resolve = Callable[[str], Awaitable[list[str]]]
Place = tuple[str, int]
_MB = 1_000_000
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_AT_ONCE = 16
"""Fetches of all clients together."""
_MAX_OF_CLIENT = 4
"""Fetches of one client."""


class NotFetched(Exception):
    """The picture could not be fetched. The message says nothing about hosts that a client cannot see itself."""


class HostResolver:
    """The resolver of the system, on threads of its own: a client chooses the names, and a lookup that hangs holds its
    thread for longer than anybody waits for it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="picture hosts")

    async def __call__(self, host: str) -> list[str]:
        """The addresses of `host`. Raises OSError."""
        lookup = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        return [str(address[0]) for *_, address in found]


class PictureFetcher:
    """Belongs to one loop. Each host is resolved once, and the connection goes to the address that was checked."""

    def __init__(
        self,
        ticker: Ticker,
        *,
        resolve: Resolve | None = None,
        reach: Callable[[Place], Place] = lambda place: place,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`reach`: where the connection to a place really goes; tests have no public servers. `tls` verifies
        certificates. Absent, `resolve` is the resolver of the system, and `tls` trusts its authorities."""
        self._ticker = ticker
        self._resolve = resolve or HostResolver()
        self._reach = reach
        self._tls = tls
        self._making_tls = asyncio.Lock()
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client, while it has fetches."""

    async def fetch(self, url: str, section: PicturesSection, client: str, buffered: Buffered) -> bytes:
        """The file at `url`, which `client` sent. While it is fetched, the largest that it may be counts as buffered.

        Raises NotFetched, also when it takes too long or is too large, and Overloaded.
        """
        turns = self._turns_of.get(client)
        if turns is None:
            turns = self._turns_of[client] = asyncio.Semaphore(_MAX_OF_CLIENT)
        num_bytes = section.max_mb * _MB
        async with turns, self._turns:
            if not buffered.has_room(num_bytes):
                raise no_room()
            buffered.num_bytes += num_bytes
            try:
                return await self._fetched(url, section)
            finally:
                buffered.num_bytes -= num_bytes

    async def _fetched(self, url: str, section: PicturesSection) -> bytes:
        try:
            async with asyncio.timeout(section.timeout_s):
                return await self._follow(url, section)
        except TimeoutError:
            raise NotFetched(f"it took longer than {section.timeout_s:g} s") from None
        except ForbiddenAddress as problem:
            raise NotFetched(str(problem)) from None
        except ResponseTooLarge:
            raise NotFetched(f"it has more than {section.max_mb} MB") from None
        except (UpstreamFault, OSError, UnicodeError):
            # What failed would tell a client which hosts and ports there are.
            raise NotFetched("its server cannot be reached, or does not respond as it should") from None

    async def _follow(self, url: str, section: PicturesSection) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            address = read_address(url, section.hosts)
            response = await self._get(address, chosen(await self._resolve(address.host)), section)
            if response.status == 200:
                return response.body
            location = next((value for name, value in response.headers if name == b"location"), None)
            if response.status not in _REDIRECTS or location is None:
                raise NotFetched(f"its server responded with status {response.status}")
            try:
                url = urljoin(url, location.decode("latin-1"))
            except ValueError:  # of a host such as `[`
                raise ForbiddenAddress("its server redirects to an invalid address") from None
        raise NotFetched(f"its server redirects more than {_MAX_REDIRECTS} times")

    async def _get(self, address: PictureAddress, resolved: str, section: PicturesSection) -> UpstreamResponse:
        limits = UpstreamLimits(fetch_body_bytes=section.max_mb * _MB, num_kept=0)
        place = self._reach((resolved, address.port))
        pool = Pool(address.origin, self._ticker, limits, tls=await self._trusted(), place=place)
        try:
            headers = ((b"accept", b"image/*"), (b"user-agent", b"cortex"))
            return await pool.fetch(b"GET", address.target.encode(), headers, timeout_s=section.timeout_s)
        except ValueError:
            raise ForbiddenAddress("it is no valid address") from None
        finally:
            pool.close()

    async def _trusted(self) -> ssl.SSLContext:
        """Reading the authorities of the system takes tens of milliseconds: once, and not on the loop."""
        async with self._making_tls:
            if self._tls is None:
                self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls
