"""A real decode process and its client: files that exceed a limit or crash it fail alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image as Files

from cortex.ipc.pool import HelperPool
from cortex.neuron.picture_process.client import Pictures, PictureWork
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.pictures.picture import Picture, PictureGrid, PicturePlace
from cortex.neuron.pictures.spec import PictureSpec, prepare
from cortex.wire.errors import InvalidValue, Overloaded, PreparationLimitExceeded, RateLimitExceeded
from cortex.wire.packed_request import PackedRequest, pack
from cortex.wire.requests import GenerateRequest, Message, PicturePart

from ...picture_files import picture, png_of_size, saved, with_scans
from ...waiting import WAIT_S, until

SPEC = PictureSpec("area", patch=16, merge=2, most=1 << 20, least=1 << 10)
LIMITS = PictureLimits(memory_mb=60, timeout_s=WAIT_S, workers=2)


@pytest_asyncio.fixture
async def pictures() -> AsyncIterator[Pictures]:
    made = Pictures(LIMITS)
    yield made
    await made.close()


def request(*files: bytes) -> PackedRequest:
    parts = tuple(PicturePart(data=file, param=f"messages[0].content[{at}]") for at, file in enumerate(files))
    return pack(GenerateRequest(model="m", messages=(Message(role="user", parts=parts),)))


async def prepared(
    pictures: Pictures, *files: bytes, tenant: bytes = b"", work: PictureWork | None = None
) -> tuple[Picture, ...]:
    packed = request(*files)
    packed = replace(packed, head=msgspec.structs.replace(packed.head, tenant=tenant))
    grids = [SPEC.grid(image.width, image.height, image.detail) for image in packed.head.pictures]
    places = [PicturePlace(number, 1000 * number, grid) for number, grid in enumerate(grids)]
    return await pictures.prepare(packed, SPEC, places, work or PictureWork("anna"))


async def test_pixels_are_those_of_the_library(pictures: Pictures) -> None:
    values = np.random.default_rng(0).integers(0, 255, (50, 90, 3), dtype=np.uint8)
    file = saved(Files.fromarray(values))
    grid = SPEC.grid(90, 50)
    expected = prepare(SPEC, grid, Files.fromarray(values))
    found = await prepared(pictures, file, picture(40, 40), file)
    assert found[0].pixels == expected.tobytes()
    assert len(found[0].pixels) == grid.num_bytes
    assert [picture.at for picture in found] == [0, 1000, 2000]
    assert found[0].key == found[2].key != found[1].key
    assert found[0].pixels == found[2].pixels


async def test_picture_is_decoded_again_only_if_it_is_not_kept() -> None:
    for limits in (PictureLimits(), PictureLimits(cache_mb=0)):
        made = Pictures(limits)
        first = await prepared(made, picture())
        await made.close()
        if limits.cache_mb:
            assert await prepared(made, picture()) == first
        else:
            with pytest.raises(Overloaded):
                await prepared(made, picture())


async def test_picture_of_another_tenant_is_decoded_as_if_it_were_new() -> None:
    made = Pictures(PictureLimits())
    (first,) = await prepared(made, picture(), tenant=b"one")
    (other,) = await prepared(made, picture(), tenant=b"two")
    assert first.key != other.key
    assert first.pixels == other.pixels
    await made.close()
    assert await prepared(made, picture(), tenant=b"one") == (first,)
    with pytest.raises(Overloaded):
        await prepared(made, picture(), tenant=b"three")


async def test_file_that_needs_too_much_memory_fails_alone(pictures: Pictures) -> None:
    bomb = picture(4000, 3000)  # 36 MB of pixels from a few KB, and as much again for a copy
    others = [asyncio.create_task(prepared(pictures, picture(64 + at, 48))) for at in range(4)]
    with pytest.raises(PreparationLimitExceeded, match=r"pictures\.memory_mb") as caught:
        await prepared(pictures, picture(), bomb)
    assert caught.value.param == "messages[0].content[1]"
    assert len(await asyncio.gather(*others)) == 4


async def test_damaged_file_is_rejected_with_its_place(pictures: Pictures) -> None:
    with pytest.raises(InvalidValue, match="damaged or cut off") as caught:
        await prepared(pictures, picture(), png_of_size(400, 400))
    assert caught.value.param == "messages[0].content[1]"


async def test_slow_file_is_ended(pictures: Pictures) -> None:
    del pictures
    hurried = Pictures(PictureLimits(timeout_s=0.001))
    try:
        with pytest.raises(PreparationLimitExceeded, match="longer than"):
            await prepared(hurried, picture(3000, 3000))
    finally:
        await hurried.close()


async def test_pictures_survive_the_end_of_their_process(pictures: Pictures) -> None:
    await prepared(pictures, picture(32, 32))
    assert pictures.process_id is not None
    os.kill(pictures.process_id, signal.SIGKILL)
    assert len(await prepared(pictures, picture(33, 32), picture(34, 32))) == 2


async def test_pixels_of_a_request_fit_one_message(pictures: Pictures) -> None:
    packed = request(picture(), picture())
    grid = PictureGrid(100, 100, 10_000, 6400, 6400)
    places = [PicturePlace(number, 10_000 * number, grid) for number in range(2)]
    with pytest.raises(InvalidValue, match="81 million pixels") as caught:
        await pictures.prepare(packed, SPEC, places, PictureWork("anna"))
    assert caught.value.param == "messages[0].content[1]"
    assert pictures.process_id is None


async def test_client_with_many_pictures_delays_no_other(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    others, slow, begun = picture(), asyncio.Event(), list[bytes]()
    call = HelperPool.call

    async def after_others(self: HelperPool, *values: Any, body: bytes, timeout_s: float) -> Any:
        begun.append(body)
        if body != others:
            await slow.wait()
        return await call(self, *values, body=body, timeout_s=timeout_s)

    monkeypatch.setattr(HelperPool, "call", after_others)
    flood = [asyncio.create_task(prepared(pictures, picture(400 + at, 400, kind="JPEG"))) for at in range(24)]
    await until(lambda: begun)
    async with asyncio.timeout(WAIT_S):
        (found,) = await prepared(pictures, others, work=PictureWork("bob"))
    assert found.pixels
    assert begun.index(others) == len(begun) - 1 == 1, "anna has one of the two places"
    slow.set()
    await asyncio.gather(*flood)


async def test_pictures_that_wait_are_bounded_for_each_client(pictures: Pictures) -> None:
    calls = [asyncio.create_task(prepared(pictures, picture(64 + at, 48))) for at in range(200)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    rejected = [end for end in ends if isinstance(end, BaseException)]
    assert rejected
    assert all(isinstance(end, RateLimitExceeded) and "your pictures are waiting" in str(end) for end in rejected)


async def test_progressive_picture_with_too_many_scans_is_rejected_without_being_decoded(pictures: Pictures) -> None:
    work = PictureWork("anna")
    with pytest.raises(InvalidValue, match=r"150 scans, at most 32 .*pictures\.max_scans") as caught:
        await prepared(pictures, with_scans(picture(64, 64, kind="JPEG", progressive=True), 150), work=work)
    assert caught.value.param == "messages[0].content[0]"
    assert (pictures.process_id, work.num_tokens) == (None, 0)
    await prepared(pictures, picture(64, 64, kind="JPEG", progressive=True))


async def test_computing_for_one_request_is_limited_and_what_was_computed_is_counted() -> None:
    hurried = Pictures(PictureLimits(request_s=1e-9))
    work = PictureWork("anna")
    try:
        with pytest.raises(PreparationLimitExceeded, match=r"pictures\.request_s"):
            await prepared(hurried, *(picture(64 + at, 64) for at in range(8)), work=work)
    finally:
        await hurried.close()
    assert work.cpu_s > 0
    assert work.num_tokens > 0


async def test_picture_that_cannot_be_decoded_counts_and_one_that_is_known_does_not(pictures: Pictures) -> None:
    work = PictureWork("anna")
    with pytest.raises(InvalidValue):
        await prepared(pictures, png_of_size(400, 400), work=work)
    assert work.num_tokens == SPEC.grid(400, 400).num_tokens
    await prepared(pictures, picture(), work=work)
    before = work.num_tokens
    await prepared(pictures, picture(), work=work)
    assert work.num_tokens == before
