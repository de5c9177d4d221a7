"""Processes that are one service: they share a port, and each can answer for all.

Rules
    1. The parent makes a private directory and tells each child its place in it (``GROUP_VARIABLE``). A child that is
       started again gets the same place.
    2. A child listens on a Unix socket in that directory. A connection is one question, a line, and one answer, up to
       the end of the stream. Only who may enter the directory (mode 0700) can ask. Answers are made in a thread, or on
       the event loop where they are of what the loop owns.
    3. A child that is ready holds a lock on its mark, a file there. The kernel releases the lock of a child that died.
       The group is ready when every mark is locked.
    4. A sibling that does not answer within ``ANSWER_TIMEOUT_S`` is left out of an answer, which says how many it has.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from poolgrid.process.instruments import GaugeFamily

log = logging.getLogger(__name__)

GROUP_VARIABLE = "POOLGRID_PROCESS_GROUP"
"""Set by the parent: ``DIRECTORY:INDEX:SIZE``."""

ANSWER_TIMEOUT_S = 2.0
"""A sibling that takes longer to print its metrics is stuck or overloaded; a scrape usually has ten seconds."""

QUESTION_BYTES_MAX = 4096
"""A name, and what it is asked about: a request's id with every character escaped is 1,536 bytes."""

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The metrics of a large pool are a few megabytes; what is longer than this is a bug, and is no answer."""

EXEMPLARS = "# EXEMPLARS "
"""Begins a comment in the metrics that processes of a group tell each other."""

READ_BYTES = 256 * 1024

Answer = Callable[[], bytes]
"""Makes an answer, in a thread."""

LoopAnswer = Callable[[str], bytes]
"""Makes an answer on the event loop, quickly; takes what followed the question's name."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which process of a group this is."""

    directory: Path
    index: int
    size: int

    @classmethod
    def from_environment(cls) -> GroupPlace | None:
        """Return the place that the parent gave this process; ``None`` when it is alone."""
        value = os.environ.get(GROUP_VARIABLE)
        if not value:
            return None
        directory, index, size = value.rsplit(":", 2)
        return cls(Path(directory), int(index), int(size))

    def to_environment(self) -> str:
        """Return the value of ``GROUP_VARIABLE`` for a child at this place."""
        return f"{self.directory}:{self.index}:{self.size}"

    def socket_path(self, index: int) -> Path:
        """Return where a member answers."""
        return self.directory / f"{index}.sock"

    def mark(self, index: int) -> Path:
        return self.directory / f"{index}.ready"


class GroupMember:
    """This process's part in its group; made on a running event loop."""

    def __init__(self, place: GroupPlace) -> None:
        self.place = place
        self._answers: dict[str, Answer] = {}
        self._loop_answers: dict[str, LoopAnswer] = {}
        self._server: asyncio.Server | None = None
        self._mark: int | None = None

    async def start(self, answers: dict[str, Answer], loop_answers: Mapping[str, LoopAnswer] = {}) -> None:
        """Answer the siblings' questions: ``answers`` by the whole line, ``loop_answers`` by its first word."""
        self._answers, self._loop_answers = answers, dict(loop_answers)
        self.set_ready(False)
        path = self.place.socket_path(self.place.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)

    def set_ready(self, ready: bool) -> None:
        """Lock the mark, or let go of it."""
        if ready and self._mark is None:
            self._mark = os.open(self.place.mark(self.place.index), os.O_RDWR | os.O_CREAT, 0o600)
            # Waits at most for a sibling that is looking just now.
            fcntl.flock(self._mark, fcntl.LOCK_EX)
        elif not ready and self._mark is not None:
            os.close(self._mark)
            self._mark = None

    def missing(self) -> str | None:
        """Return which members are not ready, in words, or ``None``."""
        away = [str(index) for index in range(self.place.size) if not self._is_ready(index)]
        return f"HTTP process {', '.join(away)} of {self.place.size} is not ready" if away else None

    def _is_ready(self, index: int) -> bool:
        if index == self.place.index:
            return self._mark is not None
        try:
            mark = os.open(self.place.mark(index), os.O_RDONLY)
        except OSError:
            return False
        try:
            # Shared, so that two who look do not take each other for the owner.
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(mark)
        return False

    def ask_siblings(self, question: str) -> list[bytes]:
        """Return the answers of the other members; blocks, so call it in a thread."""
        found = []
        for index in range(self.place.size):
            if index != self.place.index:
                try:
                    found.append(ask(self.place.socket_path(index), question))
                except OSError as error:
                    log.warning("asking HTTP process %d for %s: %s; it is left out", index, question, error)
        return found

    async def ask_member(self, index: int, question: str) -> bytes:
        """Ask one other member from the event loop; raises ``OSError``, also when it does not answer in time.

        The answer is empty when it does not know the question, or died while it answered.
        """
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(self.place.socket_path(index))
            try:
                writer.write(question.encode() + b"\n")
                said = bytearray()
                while part := await reader.read(READ_BYTES):
                    said += part
                    if len(said) > ANSWER_BYTES_MAX:
                        raise OSError(f"HTTP process {index} answers with more than {ANSWER_BYTES_MAX} bytes")
                return bytes(said)
            finally:
                writer.close()

    async def stop(self) -> None:
        """Stop answering."""
        self.set_ready(False)
        if self._server is not None:
            self._server.close()
            self.place.socket_path(self.place.index).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                question = (await reader.readline())[:QUESTION_BYTES_MAX].decode("utf-8", "replace").strip()
                name, _, about = question.partition(" ")
                if name in self._loop_answers:
                    writer.write(self._loop_answers[name](about))
                elif question in self._answers:
                    writer.write(await asyncio.to_thread(self._answers[question]))
                await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("answering a sibling: %s", error)
        finally:
            writer.close()


def ask(path: Path, question: str) -> bytes:
    """Ask one member and return its answer; raises ``OSError`` (a time-out too)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(question.encode() + b"\n")
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
        return b"".join(parts)


class GroupMetrics:
    """The metrics of all members, asked of each when somebody scrapes one; ``collect`` blocks on their answers."""

    def __init__(self, registry: CollectorRegistry, member: GroupMember) -> None:
        self._registry = registry
        self._member = member

    def text(self) -> bytes:
        """Return this process's own metrics, the answer to a sibling's ``metrics``."""
        return _text(list(self._registry.collect()))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the group."""
        own = list(self._registry.collect())
        summed = {family.name for family in own if isinstance(family, GaugeFamily) and family.across == "sum"}
        texts = [_text(own), *self._member.ask_siblings("metrics")]
        return merged_metrics((text.decode() for text in texts), summed)


class _Collected(Collector):
    """Families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Exemplar(NamedTuple):
    """An exemplar, and whose it is."""

    sample: str
    labels: dict[str, str]
    names: dict[str, str]
    value: float
    time_s: float


def _text(families: list[Metric]) -> bytes:
    """Return families as text, with their exemplars, which that form has no place for, as a comment behind it."""
    exemplars = [
        _Exemplar(sample.name, sample.labels, found.labels, found.value, float(found.timestamp or 0))
        for family in families
        for sample in family.samples
        if (found := sample.exemplar) is not None
    ]
    comment = EXEMPLARS.encode() + msgspec.json.encode(exemplars) + b"\n" if exemplars else b""
    return generate_latest(_Collected(families)) + comment


def _exemplars(text: str) -> list[_Exemplar]:
    _, found, comment = text.rpartition("\n" + EXEMPLARS)
    return msgspec.json.decode(comment, type=list[_Exemplar]) if found else []


def merged_metrics(texts: Iterable[str], summed_gauges: Collection[str]) -> Iterator[Metric]:
    """Yield the metrics of several processes, given in Prometheus' text form, as those of one.

    Counters and histograms add up, and so do ``summed_gauges``; of other gauges the largest is taken. A bucket names
    the latest of the traces that they name.
    """
    families: dict[str, Metric] = {}
    named: dict[tuple[str, frozenset[tuple[str, str]]], _Exemplar] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for exemplar in _exemplars(text):
            place = (exemplar.sample, frozenset(exemplar.labels.items()))
            if place not in named or exemplar.time_s > named[place].time_s:
                named[place] = exemplar
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into = values.setdefault(known.name, {})
            adds = known.type in ("counter", "histogram", "summary") or known.name in summed_gauges
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                before = into.get(key)
                if before is None:
                    into[key] = sample.value
                else:
                    into[key] = before + sample.value if adds else max(before, sample.value)
    for name, family in families.items():
        for (sample_name, labels), value in values[name].items():
            of = named.get((sample_name, frozenset(labels)))
            trace = None if of is None else Exemplar(of.names, of.value, of.time_s)
            family.add_sample(sample_name, dict(labels), value, exemplar=trace)
        yield family
