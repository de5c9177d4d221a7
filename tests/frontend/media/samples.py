"""Media for tests, good and hostile, made byte by byte where a library would refuse to make them."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile
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


TENSOR_PICKLE = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nFloatStorage\nq\x02"
    b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04K\x08tq\x05QK\x00K\x02K\x04\x86q\x06K\x04K\x01\x86q\x07\x89"
    b"ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
)
"""What ``torch.save`` writes for a float32 tensor of shape (2, 4)."""


def pytorch(
    program: bytes = TENSOR_PICKLE, compression: int = zipfile.ZIP_STORED, entries: dict[str, bytes] | None = None
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", bytes(32))
        archive.writestr("archive/version", b"3\n")
        for name, data in (entries or {}).items():
            archive.writestr(name, data)
    return out.getvalue()


class Exploit:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (self._command,)


def exploit_pickle(command: str, protocol: int = 2) -> bytes:
    return pickle.dumps(Exploit(command), protocol)
