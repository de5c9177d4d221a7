"""Files with pool-grid documents: reading one, bounded, with a file that cannot be read as one of its problems."""

from __future__ import annotations

from pathlib import Path

from poolgrid.kernel.pool_grids.grid_document import DOCUMENT_BYTES_MAX, GridDocumentError, Problem
from poolgrid.server.global_router.document.reader import LoadedDocument, load_document


def read_document_file(path: Path) -> LoadedDocument:
    """Read a grid document from a file; raise ``GridDocumentError``, also when the file cannot be read."""
    return load_document(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """Return a file's content, one byte more than a document may have at most; raise ``GridDocumentError``."""
    try:
        with path.open("rb") as file:
            return file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        problem = Problem((), f"cannot be read: {error.strerror or error}")
        raise GridDocumentError((problem,), (), str(path)) from None
