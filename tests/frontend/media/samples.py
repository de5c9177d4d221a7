"""Media for tests, good and hostile, made byte by byte where a library would refuse to make them."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zlib
from typing import Any

from PIL import Image


def png(width: int = 4, height: int = 4, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    return image("PNG", width, height, color)


def image(form: str, width: int = 4, height: int = 4, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, form)
    return out.getvalue()


def png_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A small file whose header promises gigapixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")
    )


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def safetensors(header: Any = None, data: bytes = bytes(32), length: int | None = None) -> bytes:
    if header is None:
        header = {"image": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


class Exploit:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self._command,)


def exploit_pickle(command: str, protocol: int = 2) -> bytes:
    return pickle.dumps(Exploit(command), protocol)
