"""Attacks with media, fetched from a server of the harness on loopback, which the pool is told to allow."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from PIL import Image

from lab.attacks.attack import Attack, Outcome, Part, Scene
from lab.attacks.pool import HOST, Shape
from lab.attacks.requests import client, in_words, post
from poolgrid.server.frontend.media.addresses import AddressPolicy

SHAPE = Shape(worker=("--modality", "multimodal"), router=("--media-allowed-networks", f"{HOST}/32"), takes_media=True)
FF_BYTES = 24_000_000
DRIP_S = 0.1
AT_ONCE = 4
BOMB_SIDE = 7000
"""49 megapixels: just below ``max_image_pixels``."""

REFUSED_ADDRESSES = (
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.0.0.1", "192.0.0.192"),
    *("192.0.0.170", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16"),
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1"),
    *("2001:2::1", "2001:db8::1", "2002:7f00:1::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1"),
    *("fec0::1", "ff02::1"),
)
"""One of each network of IANA's special-purpose registries, and the metadata services; judged, never connected to."""

ALLOWED_ADDRESSES = ("1.1.1.1", "9.9.9.9", "2606:4700:4700::1111")
"""Global ones: refusing everything would hold as well."""


def ff_jpeg(size: int) -> bytes:
    """Return a JPEG of fill bytes, each of which a parser looks at."""
    return b"\xff\xd8" + b"\xff" * size


def png(width: int, height: int, data: bytes) -> bytes:
    """Return a PNG that claims these sides, with this compressed data."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def flat_png(side: int) -> bytes:
    """Return a true PNG of one colour: small, and large when it is decoded."""
    packer = zlib.compressobj(9)
    row = b"\0" + bytes(3 * side)
    return png(side, side, b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()]))


def many_frames(count: int) -> bytes:
    """Return a GIF of many frames."""
    out = io.BytesIO()
    frames = [Image.new("P", (64, 64), number % 256) for number in range(count)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def many_chunks(count: int) -> bytes:
    """Return a PNG of very many small chunks."""
    text = b"a\0b"
    chunk = struct.pack(">I", len(text)) + b"tEXt" + text + struct.pack(">I", zlib.crc32(b"tEXt" + text))
    whole = png(4, 4, zlib.compress(bytes(52)))
    return whole[:33] + chunk * count + whole[33:]


Files = dict[str, tuple[bytes, str]]
"""Path → content and media type; ``/drip``, ``/endless`` and ``/loop`` are made as they go."""


@asynccontextmanager
async def serving(files: Files) -> AsyncIterator[str]:
    """Serve files on loopback; yields the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            if path == "/loop":
                writer.write(b"HTTP/1.1 302 Found\r\nlocation: /loop\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            elif path in ("/drip", "/endless"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\nconnection: close\r\n\r\n")
                while True:
                    writer.write(b"\x89" if path == "/drip" else bytes(65_536))
                    await writer.drain()
                    if path == "/drip":
                        await asyncio.sleep(DRIP_S)
            else:
                body, kind = files.get(path, (b"", "text/plain"))
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                    % (kind.encode(), len(body))
                )
                writer.write(body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the router has left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _ask(scene: Scene, urls: Callable[[str, int], str], files: Files) -> Outcome:
    """Ask for media until the time is over, some at once; ``urls`` takes the server and a number."""
    said: Counter[str] = Counter()
    deadline = scene.deadline()
    number = 0
    async with serving(files) as server, client(scene) as http:

        async def sender() -> None:
            nonlocal number
            while asyncio.get_running_loop().time() < deadline and number < scene.count(200, 4):
                number += 1
                url = urls(server, number)
                content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
                body = {"model": scene.pool.model.name, "messages": [{"role": "user", "content": content}]}
                said[await post(http, "/v1/chat/completions", {**body, "max_tokens": 4})] += 1

        await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    return Outcome(in_words(said))


async def fill_bytes(scene: Scene) -> Outcome:
    """JPEGs of 24 MB of 0xFF, four at once."""
    size = FF_BYTES if scene.share >= 1 else FF_BYTES // 8
    files = {"/ff.jpg": (ff_jpeg(size), "image/jpeg")}
    return await _ask(scene, lambda server, number: f"{server}/ff.jpg?{number}", files)


async def images(scene: Scene) -> Outcome:
    """Images that are larger than they look, or claim to be."""
    side = BOMB_SIDE if scene.share >= 1 else 2000
    files = {
        "/0": (png(60_000, 60_000, zlib.compress(bytes(4096))), "image/png"),
        "/1": (flat_png(side), "image/png"),
        "/2": (many_frames(500), "image/gif"),
        "/3": (many_chunks(scene.count(1_000_000)), "image/png"),
        "/4": (png(4, 4, b"\0" * 1_000_000), "image/png"),
        "/5": (b"\x89PNG\r\n\x1a\n" + b"\xff" * 1_000_000, "image/png"),
        "/6": (b"GIF89a" + b"\xff" * 1_000_000, "image/gif"),
        "/7": (b"RIFF\xff\xff\xff\xffWEBPVP8L" + b"\xff" * 1_000_000, "image/webp"),
    }
    return await _ask(scene, lambda server, number: f"{server}/{number % len(files)}?{number}", files)


async def servers(scene: Scene) -> Outcome:
    """Servers that drip, never end, or redirect in a circle."""
    ways = ("drip", "endless", "loop")
    return await _ask(scene, lambda server, number: f"{server}/{ways[number % 3]}?{number}", {})


async def inline(scene: Scene) -> Outcome:
    """The same images in the request itself."""
    size = FF_BYTES if scene.share >= 1 else FF_BYTES // 8
    data = [
        f"data:image/jpeg;base64,{base64.b64encode(ff_jpeg(size - 100_000)).decode()}",
        f"data:image/png;base64,{base64.b64encode(flat_png(2000)).decode()}",
        "data:image/png;base64," + "=" * 1_000_000,
        "data:" + ";" * 1_000_000,
    ]
    return await _ask(scene, lambda _, number: data[number % len(data)], {})


async def refused_networks(scene: Scene) -> Outcome:
    """Judge one address of each network that media may not come from; nothing is sent anywhere."""
    policy = AddressPolicy()
    reached = [address for address in REFUSED_ADDRESSES if policy.refusal(address) is None]
    kept = [address for address in ALLOWED_ADDRESSES if policy.refusal(address) is not None]
    faults = [f"media may be fetched from {', '.join(reached)}"] if reached else []
    faults += [f"media may not be fetched from {', '.join(kept)}"] if kept else []
    return Outcome(f"{len(reached)} of {len(REFUSED_ADDRESSES)} addresses that are nobody's to ask for", faults)


PART = Part(
    "media",
    "Hostile media",
    (
        Attack("fill bytes", "Names JPEGs of 24 MB of 0xFF, four at once.", fill_bytes, SHAPE, short=False),
        Attack("images", "Names images of huge sides, frames, chunks, and broken ones.", images, SHAPE, short=False),
        Attack("servers", "Names servers that drip, never end or redirect in a circle.", servers, SHAPE, short=False),
        Attack("inline", "Sends such images inside the request.", inline, SHAPE, short=False),
        Attack(
            "refused networks",
            "Checks one address of each special-purpose network at the connector; nothing is sent.",
            refused_networks,
            alone=True,
            judge_latency=False,
        ),
    ),
)
