"""How a worker starts its engine's server itself: what is wanted of it, and the command that this becomes. Pure.

Rules

1. The worker sets what it needs of the server: the addresses it listens on, where it publishes its cache events, and
   the report of reuse. Such arguments are refused by name when the operator gives them too.
2. Everything else is handed on as it is, before the worker's own arguments: where a server takes the last of two, the
   worker's count.
3. One rank publishes through sockets in a directory that only this user enters. Several ranks count ports up, so they
   publish at ports, at every address of the machine: servers bind no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from poolgrid.server.workers.engines.server.core.server_facts import EventSource

LOOPBACK = "127.0.0.1"
WILDCARDS = frozenset({"0.0.0.0", "::", "*", ""})

SECRETS = ("key", "token", "password", "secret")
"""Endings of the names of options whose values are secret."""

HIDDEN = "…"

PUBLISHER_SOCKET = "events"
REPLAY_SOCKET = "replays"
"""Names in the server's directory."""


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where a server is to publish its cache events."""

    endpoint: str
    """Of the first rank, as the server binds it."""
    replay_endpoint: str
    sources: tuple[EventSource, ...]
    """Of every rank, as one connects to them."""


@dataclass(frozen=True, slots=True)
class WantedServer:
    """A server that a worker starts."""

    model_path: str
    model_name: str
    """As clients write it."""
    host: str
    port: int
    arguments: tuple[str, ...]
    """The operator's own arguments."""
    role: str
    block_size: int | None
    """``None``: whatever is usual."""
    api_key: str
    directory: str
    """Its files may be there; it ends with the worker."""
    follows_events: bool
    """Whether its cache events are followed."""
    publishing: Publishing | None
    """Where they are published; ``None`` where they are not followed, or come another way."""
    given_file: str = ""
    """Text of the file of settings among the arguments, where the worker sets something in it."""

    @property
    def options(self) -> dict[str, str]:
        return options_in(self.arguments)

    def unless_given(self, option: str, *value: str) -> tuple[str, ...]:
        return () if option.replace("_", "-") in self.options else (option, *value)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What starts a server."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of files in its directory, by name."""
    block_size: int | None = None
    """Tokens in a block, where the server does not report it and its arguments have it."""
    publishes: bool = True
    """Whether its cache events come out of the publishers that are wanted."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How servers of one kind are started."""

    executable: str
    """Usual command, without arguments."""
    own: Mapping[str, str]
    """Options that the worker sets, each with what to do instead."""
    command: Callable[[WantedServer], ServerCommand]
    """Raises ``ValueError`` for what cannot be had."""
    rank_options: tuple[str, ...] = ()
    """Names of the option for the number of data-parallel ranks."""
    file_options: tuple[str, ...] = ()
    """Names of the option for a file in which the worker sets something."""
    publishes: bool = True
    """Whether its cache events can come out of publishers."""
    as_it_publishes: Callable[[Publishing], Publishing] = lambda publishing: publishing
    """What servers of this kind make of addresses."""
    shares_ports: bool = True
    """Whether it binds its port while the worker holds it, so that no other process gets it meanwhile."""

    def ranks(self, options: Mapping[str, str]) -> int:
        """Return how many ranks arguments ask for; raises ``ValueError`` for what is no number."""
        for name in self.rank_options:
            if name in options:
                if not options[name].isdecimal() or not int(options[name]):
                    raise ValueError(f"{name} is {options[name]!r}, allowed are integers from 1")
                return int(options[name])
        return 1


def options_in(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options among arguments, with ``-`` for every ``_``, and their values; of flags the value is empty.

    ``--a.b=c`` counts as ``--a``, as of options that are JSON.
    """
    found = {}
    for at, word in enumerate(arguments):
        if not _is_option(word):
            continue
        name, equals, value = word.partition("=")
        if not equals and at + 1 < len(arguments) and not _is_option(arguments[at + 1]):
            value = arguments[at + 1]
        found[name.partition(".")[0].replace("_", "-")] = value
    return found


def without_option(arguments: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return arguments without an option that has a value."""
    kept = []
    skipped = False
    for word in arguments:
        if skipped:
            skipped = False
            continue
        name, equals, _ = word.partition("=")
        if _is_option(word) and name.replace("_", "-") in names:
            skipped = not equals
            continue
        kept.append(word)
    return tuple(kept)


def shown(words: Sequence[str]) -> list[str]:
    """Return a command as it may stand in a log: without the values of options that are keys, tokens or passwords."""
    found: list[str] = []
    hides = False
    for word in words:
        name, equals, _ = word.partition("=")
        if _is_option(word):
            hides = name.endswith(SECRETS)
            found.append(f"{name}={HIDDEN}" if hides and equals else word)
            hides = hides and not equals
        else:
            found.append(HIDDEN if hides else word)
            hides = False
    return found


def check_arguments(arguments: Sequence[str], own: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for an argument that is the worker's to give."""
    if arguments and not _is_option(arguments[0]):
        raise ValueError(f"the server's arguments begin with {arguments[0]!r}: the model is given as model_path")
    for name in options_in(arguments):
        if name in own:
            raise ValueError(f"{name} is among the server's arguments, and is the worker's to give: {own[name]}")


def publishing_in(directory: str) -> Publishing:
    """Return where a server with one rank publishes."""
    endpoint, replay = f"ipc://{directory}/{PUBLISHER_SOCKET}", f"ipc://{directory}/{REPLAY_SOCKET}"
    return Publishing(endpoint, replay, (EventSource(0, endpoint, replay),))


def publishing_at(first_port: int, ranks: int) -> Publishing:
    """Return where a server with several ranks publishes: a port for each, then a port for the replays of each."""
    replays = first_port + ranks
    return Publishing(
        f"tcp://*:{first_port}",
        f"tcp://*:{replays}",
        tuple(
            EventSource(rank, f"tcp://{LOOPBACK}:{first_port + rank}", f"tcp://{LOOPBACK}:{replays + rank}")
            for rank in range(ranks)
        ),
    )


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()
