"""Puts pictures that a request names by address into it."""

from __future__ import annotations

import asyncio

from cortex.gateway.config import PicturesSection
from cortex.gateway.pictures.fetcher import NotFetched, PictureFetcher
from cortex.http.limits import HeldBytes
from cortex.http.server.spool import no_room
from cortex.parsing.parser import BodyParser
from cortex.parsing.picture_urls import PictureUrl, may_have_urls
from cortex.wire.errors import BodyTooLarge
from cortex.wire.pictures.parts import invalid


class PictureInlining:
    """Belongs to one loop. A reload replaces `section` while requests run."""

    def __init__(self, section: PicturesSection, fetcher: PictureFetcher, parser: BodyParser) -> None:
        self.section = section
        self._fetcher = fetcher
        self._parser = parser

    def applies(self, body: bytes) -> bool:
        """Whether `body` may have addresses that are fetched."""
        return self.section.urls and may_have_urls(body)

    async def inlined(self, body: bytes, client: str, max_bytes: int, held: HeldBytes) -> bytes:
        """`body` with the files of its pictures, which count in `held`. Raises InvalidValue, which names a picture that
        cannot be fetched, BodyTooLarge, and Overloaded."""
        section = self.section
        found = await self._parser.find_picture_urls(body, client)
        if not found:
            return body
        distinct = {each.url: each for each in reversed(found)}
        if len(distinct) > section.max_urls:
            raise invalid(
                found[-1].param,
                f"the request names {len(distinct)} pictures by address, at most {section.max_urls} are fetched "
                "(pictures.max_urls in cortex.toml); send the others themselves",
            )
        tasks = [asyncio.create_task(self._fetched(each, section, client, held)) for each in distinct.values()]
        try:
            files = dict(zip(distinct, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
        num_bytes = len(body) + sum(len(files[each.url]) for each in found) * 4 // 3
        if num_bytes > max_bytes:
            raise BodyTooLarge(
                f"With the pictures at its addresses the request has {num_bytes >> 20} MiB, at most {max_bytes >> 20} "
                "are allowed (gateway.max_body_mb); send fewer or smaller pictures."
            )
        if not held.add(num_bytes):
            raise no_room()
        whole = await self._parser.inline_pictures(body, files, client)
        held.add(len(whole) - held.num_bytes)  # the files are not needed any more
        return whole

    async def _fetched(self, picture: PictureUrl, section: PicturesSection, client: str, held: HeldBytes) -> bytes:
        try:
            return await self._fetcher.fetch(picture.url, section, client, held)
        except NotFetched as problem:
            raise invalid(picture.param, f"the picture cannot be fetched: {problem}") from None
