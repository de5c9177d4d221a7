"""What can be wrong with a journal on disk."""

from __future__ import annotations


class JournalCorrupt(Exception):
    """A file of the journal does not hold what it should; nothing was changed.

    ``offset`` is the first record that cannot be trusted; every record before it is sound.
    """

    def __init__(self, file: str, position: int, offset: int, detail: str, remedy: str) -> None:
        self.file = file
        self.position = position
        self.offset = offset
        self.detail = detail
        self.remedy = remedy
        super().__init__(f"journal file {file}, byte {position}, record {offset}: {detail}; {remedy}")


class JournalFenced(Exception):
    """Another process writes this journal now, or it lost its end: this writer's state is no fold of it any more.

    Nothing that this writer still holds may be stored, acknowledged or published. A new writer, which reads the journal
    from the start, may continue.
    """
