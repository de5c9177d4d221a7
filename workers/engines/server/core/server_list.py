"""Lists of engine servers that change while they are followed: their entries, and the servers that are wanted. Pure.

Rules

1. An entry is ``URL`` or ``ROLE=URL``. A server's worker is named after its address, so it has the same name after any
   restart, wherever the entry stands.
2. A list that comes from elsewhere (a file, a DNS name, Kubernetes) is taken as a whole. One that cannot be read
   changes nothing.
3. A server that several lists have is followed once, until no list has it any more.
4. At most ``SERVERS_MAX`` servers are followed. Those that are followed already stay; of the others the first come.
5. An address that a DNS name does not have any more leaves after ``ABSENCES_MAX`` looks in a row: large names are
   answered by a part of their addresses, another one each time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from poolgrid.kernel.wire.addresses import bracketed, http_url_problem, without_credentials
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX

ROLES = ("aggregated", "prefill", "decode")

SERVERS_MAX = 256
"""Servers of one follower: each has some ten sockets and is asked several questions a second."""

URL_CHARS_MAX = 2048
"""Of an entry; that of a single server has at most ``IDENTIFIER_BYTES_MAX``, as it stands on its worker's card."""

FILE_CHARS_MAX = 2 * SERVERS_MAX * URL_CHARS_MAX
"""Largest list: one of ``SERVERS_MAX`` longest URLs, with as much in comments."""

ABSENCES_MAX = 3

DNS, PODS = "dns+", "k8s+"
"""Schemes of entries that stand for several servers."""

DNS_FORM = "dns+http://NAME:PORT"
PODS_FORM = "k8s+http://:PORT?selector=LABELS&namespace=NAME"

_LABELS = re.compile(r"[A-Za-z0-9./_,=!() -]{1,1024}")
_NAMESPACE = re.compile(r"[a-z0-9-]{0,63}")
_PLAIN = re.compile(r"[a-z0-9.-]+:[0-9]+")


class ServerEntry(NamedTuple):
    """One engine server, and the role of its worker."""

    url: str
    role: str = "aggregated"

    @property
    def worker_id(self) -> str:
        """The name of its worker: host and port, with a hash where that is not all of the address."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = f"{parts.hostname}:{port}"
        name = re.sub(r"[^a-z0-9.-]", "-", address).strip("-")
        if _PLAIN.fullmatch(address) and not parts.path and len(name) <= IDENTIFIER_BYTES_MAX:
            return name
        return f"{name[: IDENTIFIER_BYTES_MAX - 9]}-{hashlib.sha256(self.url.encode()).hexdigest()[:8]}"


class DnsName(NamedTuple):
    """A name whose addresses are servers."""

    host: str
    port: int
    role: str


class PodSelector(NamedTuple):
    """Labels of the pods that are servers."""

    labels: str
    port: int
    namespace: str
    """Empty = the one of this process's own pod."""
    role: str


Listed = ServerEntry | DnsName | PodSelector


def role_and_url(given: str, role: str) -> tuple[str, str]:
    """Return the role and the URL of ``ROLE=URL``, or of a URL alone, whose worker has ``role``."""
    prefix, _, url = given.partition("=")
    return (prefix, url) if prefix in ROLES and url else (role, given)


def read_entry(text: str) -> Listed:
    """Return what an entry stands for; raises ``ValueError``."""
    role, given = role_and_url(text, ROLES[0])
    if len(given) > URL_CHARS_MAX or not given.isprintable() or " " in given:
        raise ValueError(f"{_shown(text)} is no URL, allowed are http://HOST:PORT, {DNS_FORM} and {PODS_FORM}")
    if given.startswith(DNS):
        return _dns_name(given, role)
    if given.startswith(PODS):
        return _selector(given, role)
    parts = _split(given, f"http://HOST:PORT, https://HOST:PORT, {DNS_FORM} and {PODS_FORM}")
    entry = ServerEntry(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}", role)
    problem = http_url_problem(entry.url)
    if problem is None and parts.query:
        problem = "has a query"
    if problem is None and len(entry.url) > IDENTIFIER_BYTES_MAX:
        problem = f"has {len(entry.url)} characters, allowed are at most {IDENTIFIER_BYTES_MAX}"
    if problem is not None:
        raise ValueError(
            f"{_shown(text)} is no server, it {problem}; allowed are http://HOST:PORT, https://HOST:PORT, {DNS_FORM} "
            f"and {PODS_FORM}"
        )
    return entry


def _shown(text: str) -> str:
    """Return an entry as an error may show it; an unread one may hold a password."""
    return repr(without_credentials(text)[:80])


class _Split(NamedTuple):
    scheme: str
    netloc: str
    hostname: str
    port: int | None
    path: str
    query: str


def _split(text: str, allowed: str) -> _Split:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        why = "has a user name in it" if "@" in text else str(error)  # the error shows what it took for the port
        raise ValueError(f"{_shown(text)}: {why}; allowed are {allowed}") from None
    host = parts.hostname or ""
    return _Split(parts.scheme, parts.netloc.lower(), host, port, parts.path, parts.query)


def _dns_name(text: str, role: str) -> DnsName:
    parts = _split(text.removeprefix(DNS), DNS_FORM)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path.strip("/") or parts.query:
        raise ValueError(f"{_shown(text)} is no name of servers, allowed is {DNS_FORM}")
    return DnsName(parts.hostname, parts.port, role)


def _selector(text: str, role: str) -> PodSelector:
    parts = _split(text.removeprefix(PODS), PODS_FORM)
    asked = parse_qs(parts.query, keep_blank_values=True)
    labels, namespace = asked.get("selector", [""])[-1], asked.get("namespace", [""])[-1]
    if (
        parts.scheme != "http"
        or parts.hostname
        or not parts.port
        or not _LABELS.fullmatch(labels)
        or not _NAMESPACE.fullmatch(namespace)
        or not asked.keys() <= {"selector", "namespace"}
    ):
        raise ValueError(
            f"{_shown(text)} selects no pods, allowed is {PODS_FORM}, as k8s+http://:8000?selector=app%3Dllm"
        )
    return PodSelector(labels, parts.port, namespace, role)


def read_file(text: str) -> tuple[ServerEntry, ...]:
    """Return the servers of a file: one entry a line, ``#`` begins a comment; raises ``ValueError``."""
    found: dict[str, ServerEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        given = line.partition("#")[0].strip()
        if not given:
            continue
        try:
            entry = read_entry(given)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(entry, ServerEntry):
            raise ValueError(
                f"line {number}: {_shown(given)} stands for several servers, allowed are URLs of single ones"
            )
        if entry.url in found:
            raise ValueError(f"line {number}: {entry.url} is there twice")
        found[entry.url] = entry
    if len(found) > SERVERS_MAX:
        raise ValueError(f"it has {len(found)} servers, allowed are at most {SERVERS_MAX}")
    return tuple(found.values())


def url_of(host: str, port: int) -> str:
    """Return the URL of a server at an address."""
    return f"http://{bracketed(host)}:{port}"


@dataclass(slots=True)
class Addresses:
    """The addresses of a DNS name, over several looks."""

    _absences: dict[str, int] = field(default_factory=dict)

    def seen(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Take in what one look has brought; return what counts as there."""
        now = set(addresses)
        absences = {address: times + 1 for address, times in self._absences.items() if address not in now}
        self._absences = {
            **{address: times for address, times in absences.items() if times < ABSENCES_MAX},
            **dict.fromkeys(now, 0),
        }
        return tuple(sorted(self._absences))


class ServerLists:
    """All lists together."""

    def __init__(self) -> None:
        self._lists: dict[str, tuple[ServerEntry, ...]] = {}
        self._wanted: dict[str, ServerEntry] = {}
        self.left_out = 0
        """Servers that are beyond ``SERVERS_MAX``."""

    @property
    def wanted(self) -> Mapping[str, ServerEntry]:
        """The servers to follow, by the names of their workers."""
        return self._wanted

    def put(self, name: str, entries: Sequence[ServerEntry]) -> bool:
        """Take a list as it is now; return whether anything changed."""
        if self._lists.get(name) == tuple(entries):
            return False
        self._lists[name] = tuple(entries)
        listed: dict[str, ServerEntry] = {}
        for each in self._lists.values():
            for entry in each:
                listed.setdefault(entry.worker_id, entry)
        kept = {name: listed[name] for name in self._wanted if name in listed}
        new = {name: entry for name, entry in listed.items() if name not in kept}
        room = max(0, SERVERS_MAX - len(kept))
        self._wanted = {**kept, **dict(list(new.items())[:room])}
        self.left_out = len(listed) - len(self._wanted)
        return True

    def list_of(self, worker_id: str) -> str:
        """Return the name of the first list that has a server; empty = none has it."""
        for name, entries in self._lists.items():
            if any(entry.worker_id == worker_id for entry in entries):
                return name
        return ""

    def entries(self, name: str) -> tuple[ServerEntry, ...]:
        return self._lists.get(name, ())
