"""Puts pictures that a request names by address into it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cortex.gateway.config import PicturesSection
from cortex.gateway.pictures.fetcher import NotFetched, PictureFetcher
from cortex.http.limits import Buffered
from cortex.parsing.parser import BodyParser
from cortex.parsing.picture_urls import PictureUrl, may_have_urls
from cortex.wire.errors import BodyTooLarge
from cortex.wire.pictures.parts import invalid


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
        """`body` with the files of its pictures, which count as buffered until it returns. Raises InvalidValue, which
        names a picture that cannot be fetched, BodyTooLarge and Overloaded."""
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
        """Adds the file, which counts as buffered from then on."""
        try:
            file = await self._fetcher.fetch(picture.url, section, client, self._buffered)
            self._buffered.num_bytes += len(file)
            files[picture.url] = file
        except NotFetched as problem:
            raise invalid(picture.param, f"the picture cannot be fetched: {problem}") from None
