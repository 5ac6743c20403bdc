"""Pictures that clients name by URL: fetched, if the operator allows it, and put into the request.

Clients must not reach the operator's network, this host or a cloud's metadata service through the gateway. So the
addresses of a host are checked, and the connection goes to a checked address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

from cortex.gateway.config import PicturesSection
from cortex.http.composed_body import no_room
from cortex.http.limits import Buffered, UpstreamLimits
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import ResponseTooLarge, UpstreamFault
from cortex.http.upstream.pool import Pool, UpstreamResponse
from cortex.parsing.parser import BodyParser
from cortex.parsing.pictures import PictureUrl, find_urls, may_have_urls
from cortex.wire.errors import BodyTooLarge
from cortex.wire.pictures.parts import invalid

Resolve = Callable[[str], Awaitable[list[str]]]
Place = tuple[str, int]
_MB = 1_000_000
_MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_MAX_AT_ONCE = 16
"""Fetches of all clients together."""
_MAX_OF_CLIENT = 4
"""Fetches of one client, and its lookups."""
_MAX_URL = 2048
_TRANSLATED = tuple(
    map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::ffff:0:0:0/96"))
)
"""Networks whose addresses embed an IPv4 address, which a translating gateway would reach."""


class PictureInlining:
    """Belongs to one loop. A reload replaces `section` while requests run."""

    def __init__(
        self, section: PicturesSection, fetcher: PictureFetcher, parser: BodyParser, buffered: Buffered
    ) -> None:
        self.section = section
        self._fetcher = fetcher
        self._parser = parser
        self._buffered = buffered

    def applies(self, body: bytes) -> bool:
        """Whether `body` may have addresses that are fetched."""
        return self.section.urls and may_have_urls(body)

    async def inlined(self, body: bytes, client: str, max_bytes: int) -> bytes:
        """`body` with its pictures' files in place of their URLs; the files count as buffered until it returns. Raises
        InvalidValue, which names a picture that cannot be fetched, BodyTooLarge and Overloaded."""
        section = self.section
        found = await self._parser.run(find_urls, body=body, client=client)
        if not found:
            return body
        distinct = {each.url: each for each in reversed(found)}
        if len(distinct) > section.max_urls:
            raise invalid(
                found[-1].param,
                f"the request names {len(distinct)} pictures by address, at most {section.max_urls} are fetched "
                "(pictures.max_urls in cortex.toml); send the others in the request",
            )
        files: dict[str, bytes] = {}
        tasks = [asyncio.create_task(self._fetch(each, section, client, files)) for each in distinct.values()]
        try:
            await asyncio.gather(*tasks)
            return await self._inlined(body, found, files, client, max_bytes)
        finally:
            for task in tasks:
                task.cancel()
            self._buffered.num_bytes -= sum(map(len, files.values()))

    async def _inlined(
        self, body: bytes, found: Sequence[PictureUrl], files: dict[str, bytes], client: str, max_bytes: int
    ) -> bytes:
        num_bytes = len(body) + sum(len(files[each.url]) for each in found) * 4 // 3
        if num_bytes > max_bytes:
            raise BodyTooLarge(
                f"With the pictures at its addresses the request has {num_bytes >> 20} MiB, at most {max_bytes >> 20} "
                "are allowed (gateway.max_body_mb); send fewer or smaller pictures."
            )
        return await self._parser.inline_pictures(body, files, client)

    async def _fetch(self, picture: PictureUrl, section: PicturesSection, client: str, files: dict[str, bytes]) -> None:
        """Add the file, which counts as buffered from then on."""
        try:
            file = await self._fetcher.fetch(picture.url, section, client, self._buffered)
            self._buffered.num_bytes += len(file)
            files[picture.url] = file
        except NotFetched as problem:
            raise invalid(picture.param, f"the picture cannot be fetched: {problem}") from None


class NotFetched(Exception):
    """The picture could not be fetched. The message reveals nothing about hosts that a client cannot reach itself."""


class HostResolver:
    """The system's resolver, on its own threads: clients choose the names, and a lookup that hangs holds its thread
    after its client has given up."""

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
        """`reach` redirects connections, for tests, which have no public servers. `tls` verifies certificates. By
        default `resolve` is the system's resolver, and `tls` trusts the system's authorities."""
        self._ticker = ticker
        self._resolve = resolve or HostResolver()
        self._reach = reach
        self._tls = tls
        self._making_tls = asyncio.Lock()
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client, while it has fetches."""
        self._num_lookups: Counter[str] = Counter()
        """By client: unfinished lookups, including abandoned ones."""

    async def fetch(self, url: str, section: PicturesSection, client: str, buffered: Buffered) -> bytes:
        """The file at `url`, which `client` sent. While it is fetched, its maximum size counts as buffered.

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
                return await self._fetched(url, section, client)
            finally:
                buffered.num_bytes -= num_bytes

    async def _fetched(self, url: str, section: PicturesSection, client: str) -> bytes:
        try:
            async with asyncio.timeout(section.timeout_s):
                return await self._follow(url, section, client)
        except TimeoutError:
            raise NotFetched(f"it took longer than {section.timeout_s:g} s") from None
        except ForbiddenAddress as problem:
            raise NotFetched(str(problem)) from None
        except ResponseTooLarge:
            raise NotFetched(f"it has more than {section.max_mb} MB") from None
        except (UpstreamFault, OSError, UnicodeError):
            # The reason would reveal to a client which hosts and ports exist.
            raise NotFetched("its server cannot be reached, or does not respond as it should") from None

    async def _follow(self, url: str, section: PicturesSection, client: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            address = read_address(url, section.hosts)
            response = await self._get(address, chosen(await self._look_up(address.host, client)), section)
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

    async def _look_up(self, host: str, client: str) -> list[str]:
        """The addresses of `host`. A hanging lookup holds its thread after the fetch has failed, and counts against its
        client until it ends, so that no client occupies all threads. Raises OSError or NotFetched."""
        if self._num_lookups[client] >= _MAX_OF_CLIENT:
            raise NotFetched("other hosts that you named are still being looked up; try again later")
        lookup = asyncio.ensure_future(self._resolve(host))
        self._num_lookups[client] += 1

        def ended(lookup: asyncio.Future[list[str]]) -> None:
            self._num_lookups[client] -= 1
            if not self._num_lookups[client]:
                del self._num_lookups[client]
            if not lookup.cancelled():
                lookup.exception()  # possibly no one awaits it

        lookup.add_done_callback(ended)
        return await asyncio.shield(lookup)

    async def _get(self, address: PictureAddress, resolved: str, section: PicturesSection) -> UpstreamResponse:
        limits = UpstreamLimits(fetch_body_bytes=section.max_mb * _MB, num_kept=0)
        place = self._reach((resolved, address.port))
        pool = Pool(address.origin, self._ticker, limits, tls=await self._trusted(), place=place)
        try:
            headers = ((b"accept", b"image/*"), (b"user-agent", b"cortex"))
            return await pool.fetch(b"GET", address.target.encode(), headers, timeout_s=section.timeout_s)
        except ValueError:
            raise ForbiddenAddress("its address is invalid") from None
        finally:
            pool.close()

    async def _trusted(self) -> ssl.SSLContext:
        """Reading the system's authorities takes tens of milliseconds: done once, and not on the loop."""
        async with self._making_tls:
            if self._tls is None:
                self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls


class ForbiddenAddress(ValueError):
    """The address may not be fetched. The message says why."""


class PictureAddress(NamedTuple):
    """Where a picture is, before its host is resolved."""

    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}" if self.port == 443 else f"https://{host}:{self.port}"


def read_address(url: str, hosts: tuple[str, ...]) -> PictureAddress:
    """The parts of an https URL, at one of `hosts` if there are any. Raises ForbiddenAddress."""
    try:
        parts = urlsplit(url)
        port = parts.port or 443
        host = (parts.hostname or "").rstrip(".").encode("ascii" if url.isascii() else "idna").decode().lower()
    except ValueError:  # of ports, and of host names that cannot be encoded
        raise ForbiddenAddress("its address is invalid") from None
    if parts.scheme.lower() != "https":
        raise ForbiddenAddress("only https addresses are fetched")
    if len(url) > _MAX_URL or not url.isprintable() or " " in url or not host:
        raise ForbiddenAddress("its address is invalid")
    if parts.username is not None or parts.password is not None:
        raise ForbiddenAddress("it contains a name or a password")
    if hosts and not any(host == name or (name.startswith(".") and host.endswith(name)) for name in hosts):
        raise ForbiddenAddress("its host is not among those that the operator allows (pictures.hosts)")
    path = parts.path or "/"
    target = f"{path}?{parts.query}" if parts.query else path
    if not target.isascii():
        raise ForbiddenAddress("it must be encoded as ASCII")
    return PictureAddress(host, port, target)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # also of a scoped address, which is local
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.is_site_local or found.scope_id is not None or any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not found.is_multicast and not found.is_unspecified and not found.is_reserved


def chosen(addresses: list[str]) -> str:
    """The address to connect to. Raises ForbiddenAddress if any is not public: a name with both kinds is an attack."""
    if not addresses:
        raise ForbiddenAddress("its host has no address")
    if not all(map(is_public, addresses)):
        raise ForbiddenAddress("its host is not on the public internet")
    return addresses[0]
