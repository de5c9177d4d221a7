"""Files of precomputed embeddings, checked without loading them: ``.safetensors``.

Such a file is a length, a JSON header and raw bytes: the header must describe exactly the bytes that are there.
PyTorch's ``.pt`` is a zip archive around a pickle, and a pickle is a program: such files are refused.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from poolgrid.frontend.media.references import MediaRefused

SAFETENSORS = "application/x-safetensors"

HEADER_BYTES_MAX = 1024 * 1024
"""Header of a safetensors file; embeddings are a handful of tensors of 100 bytes of header each."""

TENSORS_MAX = 256
DIMENSIONS_MAX = 8

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def check_embeddings(data: bytes) -> str:
    """Return the media type of a file of embeddings; raises ``MediaRefused``. Nothing in it is executed."""
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise MediaRefused(
            "media_embeddings_unsafe",
            "the embeddings file is PyTorch's (.pt), which holds a program: allowed is .safetensors, as "
            "safetensors.torch.save_file writes it. Nothing in it was executed",
        )
    _check_safetensors(data)
    return SAFETENSORS


def _check_safetensors(data: bytes) -> None:
    if len(data) < 8:
        raise _broken(f"the file has {len(data)} bytes; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER_BYTES_MAX, len(data) - 8):
        raise _broken(
            f"its header claims {length} bytes; the file has {len(data) - 8} after the length, and allowed are at most "
            f"{HEADER_BYTES_MAX}"
        )
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken("its header is not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise _broken(f"it holds {len(tensors)} tensors, allowed are 1 to {TENSORS_MAX}")
    spans = sorted(_span(name, entry) for name, entry in tensors.items())
    end = 0
    for begin, until, name in spans:
        if begin != end:
            raise _broken(f"tensor {name[:80]!r} begins at byte {begin} of the data, where {end} is the next free one")
        end = until
    if end != len(data) - 8 - length:
        raise _broken(f"its tensors end at byte {end} of the data, which has {len(data) - 8 - length}")


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """Return where a tensor's bytes begin and end."""
    where = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict):
        raise _broken(f"{where} is described by no JSON object")
    dtype = entry.get("dtype")
    size = _DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise _broken(f"{where} has the dtype {str(dtype)[:40]!r}, allowed are {', '.join(sorted(_DTYPE_BYTES))}")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or len(shape) > DIMENSIONS_MAX:
        raise _broken(f"{where} has the shape {str(entry.get('shape'))[:80]}, allowed are up to {DIMENSIONS_MAX} sizes")
    if offsets is None or len(offsets) != 2:
        raise _broken(
            f"{where} has the data_offsets {str(entry.get('data_offsets'))[:80]}, allowed are two byte positions"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * size:
        raise _broken(f"{where} has {end - begin} bytes, its shape {shape} of {dtype} needs {math.prod(shape) * size}")
    return begin, end, name


def _counts(value: Any) -> list[int] | None:
    """Return a list of sizes, or ``None`` for anything else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value):
        return value
    return None


def _broken(detail: str) -> MediaRefused:
    return MediaRefused("media_broken", f"the embeddings file is broken: {detail}")
