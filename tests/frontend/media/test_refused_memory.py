"""A medium that is refused is gone with its request: nothing of it waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.media.loader import MediaLease
from tests.frontend.media.hostile_server import answer, hostile_server
from tests.frontend.media.loading import Loading, loading
from tests.frontend.media.samples import data_url, png, png_bomb

MEGABYTE = 1024 * 1024
BROKEN = b"\xff\xd8" + b"\xff" * (MEGABYTE // 2)

CASES: dict[str, Callable[[Callable[[str], str]], list[str]]] = {
    "a broken picture": lambda url: [url("/broken.jpg")],
    "one of too many pixels": lambda url: [url("/bomb.png")],
    "one that is too large": lambda url: [url("/large.png")],
    "one that ends too early": lambda url: [url("/short.png")],
    "a broken data URL": lambda url: [data_url(BROKEN)],
    "a data URL that is not base64": lambda url: [data_url(BROKEN)[:-1] + "!"],
    "an address that is refused": lambda url: ["http://10.0.0.1/x.png"],
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_refused_medium_waits_for_the_collector(name: str) -> None:
    async def refuse(media: Loading, urls: list[str]) -> None:
        with pytest.raises(RequestError):
            await media.take(*urls)

    async def frames() -> list[FrameType]:
        async with hostile_server() as server, loading(max_file_size_mb=1) as media:
            server.plays["/broken.jpg"] = answer(BROKEN)
            server.plays["/bomb.png"] = answer(png_bomb())
            server.plays["/large.png"] = answer(bytes(MEGABYTE + 1), length=None)
            server.plays["/short.png"] = answer(BROKEN, length=MEGABYTE)
            server.plays["/good.png"] = answer(png())
            urls = CASES[name](server.url)
            await refuse(media, urls)  # what is made with the first one stays
            gc.collect()
            gc.disable()
            try:
                for _ in range(3):
                    await refuse(media, urls)
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                found: list[Any] = [each for each in gc.garbage if isinstance(each, FrameType)]
                return [frame for frame in found if "/api/media/" in frame.f_code.co_filename]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    assert [frame.f_code.co_name for frame in asyncio.run(frames())] == []


def test_what_was_fetched_beside_a_refused_medium_does_not_wait_for_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = MEGABYTE // 2

    async def waiting_bytes() -> int:
        async with hostile_server() as server, loading(max_file_size_mb=1) as media:
            arrived = asyncio.Event()
            came = 0
            genuine = MediaLease.add

            def add(lease: MediaLease, size: int) -> None:
                nonlocal came
                genuine(lease, size)
                came += size
                if came >= half:
                    arrived.set()

            async def half_of_it(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(answer(bytes(half), length=MEGABYTE))
                await reader.read()

            async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await arrived.wait()
                writer.write(answer(b"\xff\xd8 broken"))
                await writer.drain()

            monkeypatch.setattr(MediaLease, "add", add)
            server.plays["/half.png"] = half_of_it
            server.plays["/broken.jpg"] = broken
            gc.collect()
            gc.disable()
            try:
                with pytest.raises(RequestError):
                    await media.take(server.url("/half.png"), server.url("/broken.jpg"))
                await server.all_closed.wait()  # the other fetch is cancelled a moment later
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                lists = [each for each in gc.garbage if type(each) is list]
                held = [piece for each in lists for piece in each if isinstance(piece, bytes)]
                return sum(len(piece) for piece in held)
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    assert asyncio.run(waiting_bytes()) < 16 * 1024
