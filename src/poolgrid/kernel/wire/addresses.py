"""Addresses that one process gives another: their form, checked before a socket to them is opened.

A worker's card, a sources file and a command line all carry addresses that other processes connect to. ZMQ reports what
is wrong with one only when a socket is made, in the process that reads it; these checks report it at the door. They
look at the form alone: whether a process listens there is found out by connecting.

Each ``..._problem`` returns why an address cannot be used, in words that follow the address (``'tcp://w' names no
port``), or ``None``.

Names in place of addresses: ``namespace.component.endpoint``, as ``dyn://`` addresses and as parts of settings.

A *namespace* is one pool, a *component* what some of its processes do (``router``, ``consolidator``, ``worker``,
``prefill``, ``decode``, ``encode``, ``embedding``, …), an *endpoint* one of the places where such a process listens
(``http``, ``select``, ``ingest``, ``feed``, ``query``, ``generate``). The global router is no part of a pool; it has a
namespace all the same.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from poolgrid.kernel.wire.identifiers import Role

PORT_MAX = 65_535
"""TCP ports are 16 bits; 0 means "any free one" and cannot be connected to."""

HOST_CHARS_MAX = 253
"""Longest name in the DNS (RFC 1035, in its text form)."""

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""A part of a host name; the underscore is no host's by the RFC, and common in container networks."""

_NUMBERS = re.compile(r"[0-9.]+")

TCP = "tcp://"
IPC = "ipc://"

IPC_PATH_BYTES_MAX = 107
"""What a Unix socket's path has room for on Linux, without its final zero."""


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: addresses of IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_problem(host: str) -> str | None:
    """Return why a host (no brackets around IPv6) cannot be connected to, or ``None``."""
    if not host:
        return "names no host"
    if len(host) > HOST_CHARS_MAX:
        return f"has a host of {len(host)} characters, allowed are at most {HOST_CHARS_MAX}"
    if ":" in host:
        address, _, zone = host.partition("%")
        try:
            ip: IPv4Address | IPv6Address = IPv6Address(address)
        except ValueError:
            return f"has the host {host!r}, which is no IPv6 address"
        if zone and not _LABEL.fullmatch(zone):
            return f"has the host {host!r}, whose zone is no name of an interface"
    elif _NUMBERS.fullmatch(host):
        try:
            ip = IPv4Address(host)
        except ValueError:
            return f"has the host {host!r}, which is no IPv4 address"
    else:
        labels = host.removesuffix(".").split(".")
        if all(_LABEL.fullmatch(label) for label in labels):
            return None
        return f"has the host {host!r}, allowed are an IP address or a name of letters, digits, '.', '-' and '_'"
    if ip.is_unspecified:
        return f"has the host {host!r}, which stands for every address of a machine: no process can connect to it"
    return None


def zmq_endpoint_problem(endpoint: str, local: bool = False) -> str | None:
    """Return why a ZMQ endpoint cannot be connected to, or ``None``.

    Endpoints are ``tcp://host:port``; with ``local``, where both ends may be on one machine, ``ipc://path`` too.
    """
    if local and endpoint.startswith(IPC):
        path = endpoint.removeprefix(IPC)
        if not path.isprintable() or not 1 <= len(path.encode()) <= IPC_PATH_BYTES_MAX:
            return f"has a path that is not of 1 to {IPC_PATH_BYTES_MAX} printable bytes"
        return None
    if not endpoint.startswith(TCP):
        return f"begins with neither {TCP} nor {IPC}" if local else f"does not begin with {TCP}"
    return _place_problem(endpoint.removeprefix(TCP), port_needed=True)


def ip_endpoint_problem(endpoint: str) -> str | None:
    """Say why a gateway cannot send to ``ip:port`` (``[ipv6]:port``), or ``None``; gateways look up no names."""
    problem = _place_problem(endpoint, port_needed=True)
    if problem is not None:
        return problem
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        ip_address(host)
    except ValueError:
        return f"has the host {host!r}, which is no IP address"
    return None


def http_url_problem(url: str) -> str | None:
    """Return why no HTTP server can be reached at a base URL, ``http[s]://host[:port][/path]``, or ``None``."""
    for scheme in ("http://", "https://"):
        if url.startswith(scheme):
            place, slash, path = url.removeprefix(scheme).partition("/")
            is_plain = path.isascii() and path.isprintable() and not set(path) & set(' ?#"<>\\^`{|}')
            if (slash and not is_plain) or set(place) & set("?#"):
                return "has a path with a query, a fragment, a space or characters that URLs do not have"
            problem = _place_problem(place, port_needed=False)
            # A password may hold the first slash; any other problem would show what is in front of it.
            return _HAS_USER if problem is not None and "@" in path else problem
    return "begins with neither http:// nor https://"


def without_credentials(address: str) -> str:
    """Return an address, usable or not, as errors, logs and answers may show it.

    A user name and a password (all in front of the last ``@``: a password that is not percent-encoded may hold ``/``
    and ``@`` itself) and the query of an HTTP URL are ``***``.
    """
    found = _SCHEME.match(address)
    head = "" if found is None else found[0]
    _, at, place = address[len(head) :].rpartition("@")
    if _HTTP.search(head):
        place = _QUERY.sub(r"\1***", place)
    return f"{head}{'***@' if at else ''}{place}"


_HTTP = re.compile(r"(?<!\+)https?://$", re.IGNORECASE)
"""Not ``k8s+http://``, whose query selects pods."""

_QUERY = re.compile(r"([?#]).*", re.DOTALL)

_SCHEME = re.compile(r"([^@]*=)?[a-z][a-z0-9+.-]*://", re.IGNORECASE)
"""The scheme of an address, after the name or role that some options put in front (``prefill=http://...``)."""


_HAS_USER = "has a user name in it, which is not sent anywhere"


def _place_problem(place: str, port_needed: bool) -> str | None:
    if "@" in place:
        return _HAS_USER
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket or ":" not in host:
            return "has a bracket that does not hold an IPv6 address"
        colon, port = rest[:1], rest[1:]
        if rest and colon != ":":
            return "has something other than a port after its IPv6 address"
    else:
        host, colon, port = place.rpartition(":") if ":" in place else (place, "", "")
        if ":" in host:
            return "has an IPv6 address without brackets, or more than one port"
    problem = host_problem(host)
    if problem is not None:
        return problem
    if not colon:
        return "names no port" if port_needed else None
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX):
        return f"has the port {port!r}, allowed are 1 to {PORT_MAX}"
    return None


SCHEME = "dyn://"

ROUTER = "router"
CONSOLIDATOR = "consolidator"
GLOBAL_ROUTER = "global-router"

COMPONENTS = {role: "worker" if role is Role.AGGREGATED else role.name.lower() for role in Role}
"""What workers are called by what they do."""

PART_CHARS_MAX = 64
"""Characters of each of the three; all of them and the scheme stay below what an identifier may have."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""What a file name, a subject of NATS and a label of Kubernetes can carry alike, but for the underscore there."""


class EndpointName(NamedTuple):
    """The name of an endpoint."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}.{self.component}.{self.endpoint}"


def is_name(address: str) -> bool:
    """Return whether an address is a name, well formed or not."""
    return address.startswith(SCHEME)


def part_problem(part: str) -> str | None:
    """Say why a part of a name cannot be used, in words that follow it, or ``None``."""
    if _PART.fullmatch(part):
        return None
    return f"is no name: allowed are 1 to {PART_CHARS_MAX} letters, digits, '-' and '_', and no '-' at the beginning"


def parse_name(address: str) -> EndpointName:
    """Return the name in a ``dyn://`` address; raises ``ValueError``."""
    parts = address.removeprefix(SCHEME).split(".")
    if not is_name(address) or len(parts) != 3:
        raise ValueError(f"{without_credentials(address)!r} is not of the form {SCHEME}namespace.component.endpoint")
    for word, part in zip(("namespace", "component", "endpoint"), parts, strict=True):
        problem = part_problem(part)
        if problem is not None:
            shown = without_credentials(address)
            raise ValueError(f"the {word} of {shown!r} is {without_credentials(part)!r}, which {problem}")
    return EndpointName(*parts)
