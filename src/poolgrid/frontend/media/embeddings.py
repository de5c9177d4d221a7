"""Files of precomputed embeddings, checked without loading them: ``.safetensors`` and PyTorch's ``.pt``.

A ``.safetensors`` file is a length, a JSON header and raw bytes: the header must describe exactly the bytes that are
there. A ``.pt`` file is a zip archive around a pickle, and a pickle is a program. It is read here opcode by opcode and
never run: only what ``torch.save`` writes for tensors in dicts, lists and tuples may occur. (The engine then loads it
with ``weights_only=True``, which is the second lock on the same door.)
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from typing import Any

import msgspec

from poolgrid.frontend.media.refusals import MediaRefused

SAFETENSORS = "application/x-safetensors"
PYTORCH = "application/x-pytorch"

HEADER_BYTES_MAX = 1024 * 1024
"""Header of a safetensors file; embeddings are a handful of tensors of 100 bytes of header each."""

TENSORS_MAX = 256
DIMENSIONS_MAX = 8
PICKLE_BYTES_MAX = 1024 * 1024
ARCHIVE_ENTRIES_MAX = 1024
DIRECTORY_BYTES_MAX = 128 * 1024
"""Directory of a ``.pt`` archive, which is parsed in Python and, in its extra fields, in quadratic time: at most about
0.1 s. ``torch.save`` takes some 70 bytes for each tensor."""

OPCODES_MAX = 65_536
"""Opcodes of a pickle, about 1 µs each; a tensor takes some 40."""

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip

_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(
            f"torch {name}Storage"
            for name in ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
        ),
        "torch.storage UntypedStorage",
        "torch.storage TypedStorage",
    }
)
"""What a pickle of plain tensors names; ``torch.load(weights_only=True)`` allows these and more."""

_OPCODES = frozenset(
    {
        "PROTO", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
        "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
        "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPERSID", "GLOBAL", "REDUCE",
        "FRAME",
    }
)  # fmt: skip
"""No BUILD, NEWOBJ, INST, OBJ, EXT or STACK_GLOBAL: ``torch.save`` (protocol 2) needs none of them for tensors."""


def check_embeddings(data: bytes) -> str:
    """Return the media type of a file of embeddings; raises ``MediaRefused``. Nothing in it is executed."""
    if data[:2] == b"PK":
        _check_pytorch(data)
        return PYTORCH
    if data[:1] == b"\x80":
        raise _unsafe(
            "the file is a bare pickle (PyTorch before 1.6): allowed is what torch.save writes today, or .safetensors"
        )
    _check_safetensors(data)
    return SAFETENSORS


# -- safetensors ---------------------------------------------------------------------------------------------------


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


# -- PyTorch -------------------------------------------------------------------------------------------------------


def _check_pytorch(data: bytes) -> None:
    try:
        file = _BoundedFile(data, DIRECTORY_BYTES_MAX)
        with zipfile.ZipFile(file) as archive:
            file.read_bytes_max = PICKLE_BYTES_MAX
            entries = archive.infolist()
            _check_entries(entries, len(data))
            pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
            if len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl"):
                names = ", ".join(entry.filename[:40] for entry in pickles[:4]) or "none"
                raise _unsafe(f"it holds the pickles {names}: allowed is one data.pkl (no TorchScript)")
            if pickles[0].file_size > PICKLE_BYTES_MAX:
                raise _broken(f"its data.pkl has {pickles[0].file_size} bytes, allowed are at most {PICKLE_BYTES_MAX}")
            program = archive.read(pickles[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise _broken(f"it is not a zip archive as torch.save writes it: {error}") from None
    _check_pickle(program)


class _BoundedFile(io.BytesIO):
    """A file of which at most ``read_bytes_max`` bytes are read at once: what an archive claims is not believed."""

    def __init__(self, data: bytes, read_bytes_max: int) -> None:
        super().__init__(data)
        self.read_bytes_max = read_bytes_max

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` bytes, or all that are left; raises ``BadZipFile`` when that is too many."""
        left = len(self.getbuffer()) - self.tell()
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.read_bytes_max:
            raise zipfile.BadZipFile(f"{wanted} bytes are to be read at once, allowed are {self.read_bytes_max}")
        return super().read(wanted)


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    if len(entries) > ARCHIVE_ENTRIES_MAX:
        raise _broken(f"it has {len(entries)} entries, allowed are at most {ARCHIVE_ENTRIES_MAX}")
    for entry in entries:
        name = entry.filename
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise _unsafe(f"it has an entry named {name[:80]!r}, which leaves the archive")
        if "/code/" in name or name.endswith(".py"):
            raise _unsafe(f"it holds code ({name[:80]!r}): allowed are tensors only")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise _broken(f"its entry {name[:80]!r} is compressed; torch.save compresses nothing")
    total = sum(entry.file_size for entry in entries)
    if total > size:
        raise _broken(f"its entries claim {total} bytes, the file has {size}")


def _check_pickle(program: bytes) -> None:
    """Read a pickle as a list of opcodes and refuse every one that plain tensors do not need."""
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(program)):
            if number >= OPCODES_MAX:
                raise _broken(f"its pickle has more than {OPCODES_MAX} opcodes, the limit")
            if opcode.name not in _OPCODES:
                raise _unsafe(f"its pickle uses {opcode.name} at byte {position}, which tensors do not need")
            if opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise _unsafe(f"its pickle names {str(argument)[:80]!r} at byte {position}: allowed are tensors only")
    except MediaRefused:
        raise
    except Exception as error:  # pickletools raises whatever its argument readers raise
        raise _broken(f"its pickle does not parse: {error}") from None


def _broken(detail: str) -> MediaRefused:
    return MediaRefused("media_broken", f"the embeddings file is broken: {detail}")


def _unsafe(detail: str) -> MediaRefused:
    return MediaRefused(
        "media_embeddings_unsafe", f"the embeddings file is refused: {detail}. Nothing in it was executed"
    )
