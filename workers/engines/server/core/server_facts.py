"""What is known of an engine server: which engine it is, what it serves, and where it publishes its cache events.

A fact is ``None``, or empty, where neither the server nor an option gives it: code that needs it names the option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX, LORAS_PER_WORKER_MAX
from poolgrid.kernel.worker_protocol.engine_numbers import count_of

VERSION_CHARS_MAX = 64
"""Of a version that are kept: a card has room for 256 bytes with the engine's name."""

RANKS_MAX = 1024
"""Data-parallel ranks behind one URL: several times the largest deployments. Each has books and a stream."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank's cache events are published."""

    dp_rank: int
    endpoint: str
    """As one connects to it; empty = it cannot be followed."""
    replay_endpoint: str = ""
    """Empty = it has none: frames that are lost stay lost."""
    topic: str = ""
    problem: str = ""
    """Why it cannot be followed, and what to set."""
    doubt: str = ""
    """What is probably wrong should it never be reached."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of an engine server."""

    kind: str = ""
    """Name of its engine, as ``--engine`` takes it."""
    version: str = ""
    model: str = ""
    """Served model name, as clients write it."""
    model_path: str = ""
    """What the server loaded: a directory on its machine, or a name on a model hub."""
    block_size: int | None = None
    max_sequence_length: int | None = None
    total_blocks: int | None = None
    """Device blocks of one rank."""
    max_batch_size: int | None = None
    """Requests in one step of a rank."""
    max_num_tokens: int | None = None
    """Tokens in one step of a rank."""
    drafts: bool = False
    """It is known to draft tokens, in whatever way."""
    loras: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Further names of the model."""
    ranks: int = 1
    """Data-parallel ranks behind the one URL."""
    rank_numbers: tuple[int, ...] = ()
    """Their numbers in the deployment, which begin above 0 on all its machines but the first; empty = unknown."""
    sources: tuple[EventSource, ...] = ()
    """Of the ranks that publish."""
    events_missing: str = ""
    """Why the cache events of some rank cannot be followed, and what to set; empty = those of all ranks can be."""
    drained_events: str = ""
    """Path that hands its cache events out over HTTP, to one reader; empty = it has none."""
    kept_events_max: int = 0
    """That path hands out some of the engine's events, and keeps so many; 0 = it hands out all."""
    role: str = ""
    """The only role in which it takes requests; empty = it does not report one."""
    kv_bootstrap_port: int = 0
    """Port where decode servers ask a prefill server for the place of its KV; 0 = its engine has no such port."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all ranks, as requests name them: what is known of them, or counted from 0."""
        known = tuple(source.dp_rank for source in self.sources)
        if len(known) != self.ranks:
            known = self.rank_numbers
        first = known[0] if known else 0
        return known if len(known) == self.ranks else tuple(range(first, first + self.ranks))

    def differs_from(self, before: ServerFacts) -> str:
        """Say in what a server that came back is another one than before; empty = in nothing that a pool relies on."""
        for name in ("kind", "model", "block_size", "max_sequence_length", "ranks", "numbers", "role"):
            was, now = getattr(before, name), getattr(self, name)
            if was is not None and now is not None and was != now:
                return f"its {name} is {now}, it was {was}"
        if self.sources != before.sources:
            return f"it publishes at {_addresses(self)}, it did at {_addresses(before)}"
        return ""


def _addresses(facts: ServerFacts) -> str:
    return ", ".join(each.endpoint for each in facts.sources) or "no address"


class ListedModel(msgspec.Struct, gc=False):
    """One entry of ``/v1/models``."""

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: Any = None


class ModelList(msgspec.Struct, gc=False):
    """What ``/v1/models`` answers."""

    data: list[ListedModel] = []


def vetted(facts: ServerFacts) -> ServerFacts:
    """Return facts that fit a card, without the numbers that cannot be.

    Raises ``ValueError`` for a name or a number of ranks without which no worker can join.
    """
    if not 1 <= facts.ranks <= RANKS_MAX:
        raise ValueError(f"the engine server has {facts.ranks} data-parallel ranks, allowed are 1 to {RANKS_MAX}")
    if not 0 < len(facts.model.encode()) <= IDENTIFIER_BYTES_MAX:
        raise ValueError(
            f"the engine server's model is {facts.model[:60]!r}, with {len(facts.model.encode())} bytes, allowed are 1 "
            f"to {IDENTIFIER_BYTES_MAX}"
        )
    return replace(
        facts,
        version=facts.version.encode("ascii", "replace").decode()[:VERSION_CHARS_MAX],
        block_size=count_of(facts.block_size, 1),
        max_sequence_length=count_of(facts.max_sequence_length, 1),
        total_blocks=count_of(facts.total_blocks, 1),
        max_batch_size=count_of(facts.max_batch_size, 1),
        max_num_tokens=count_of(facts.max_num_tokens, 1),
    )


def choose_model(listed: ModelList, wanted: str) -> ListedModel:
    """Return the model that is served under a name, or the first that is no adapter; raises ``ValueError``."""
    models = [each for each in listed.data if each.parent is None]
    if not models:
        raise ValueError("reading /v1/models: it lists no model")
    if not wanted:
        return models[0]
    for each in models:
        if each.id == wanted:
            return each
    raise ValueError(
        f"served_model_name is {wanted!r}, the server has {', '.join(repr(each.id) for each in models[:20])}"
    )


def adapters_of(listed: ModelList, model: ListedModel) -> tuple[str, ...]:
    """Return the names of the adapters of a model, as the server lists them."""
    parents = {model.id, *aliases_of(listed, model), model.root} - {None}
    return _names(each.id for each in listed.data if each.parent in parents)


def aliases_of(listed: ModelList, model: ListedModel) -> tuple[str, ...]:
    """Return the further names of a model: entries of the same files that are no adapters."""
    same = (each for each in listed.data if each.parent is None and each.root == model.root and each.root)
    return _names(each.id for each in same if each.id != model.id)


def _names(listed: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a card can carry, each once."""
    fitting = (each for each in listed if 0 < len(each.encode()) <= IDENTIFIER_BYTES_MAX)
    return tuple(dict.fromkeys(fitting))[:LORAS_PER_WORKER_MAX]


def reachable(endpoint: str, server_host: str) -> str:
    """Return a publisher's endpoint as one connects to it: a wildcard stands for the server's host.

    Raises ``ValueError`` for an address that no client can connect to.
    """
    if not endpoint.startswith("tcp://"):
        if endpoint.startswith("ipc://"):
            return endpoint
        raise ValueError(f"its endpoint is {endpoint!r}, allowed are tcp://*:PORT and ipc://PATH")
    parts = urlsplit(endpoint.replace("*", "0.0.0.0", 1))
    try:
        port = parts.port
    except ValueError:
        port = None
    if not port:
        raise ValueError(f"its endpoint is {endpoint!r}, which has no port that could be connected to")
    host = parts.hostname or ""
    if host in ("0.0.0.0", "::"):
        host = server_host
    return f"tcp://{bracketed(host)}:{port}"


def doubt_of_family(endpoint: str, server_host: str) -> str:
    """Return what is wrong with a wildcard of a server that is reached by IPv6; empty = nothing.

    Engines leave ZMQ's sockets at IPv4, where a wildcard means no address of the other family.
    """
    if ":" in server_host and ("*" in endpoint or "0.0.0.0" in endpoint):
        return f"its endpoint {endpoint} is of IPv4, and its URL of IPv6: have it bind an address, as [::1]"
    return ""


CONFIG_BYTES_MAX = 4 * 2**20
"""Configurations have a few kilobytes, with quantization by layer up to a megabyte."""

Types = Annotated[list[str], msgspec.Meta(max_length=4096)]


class _Text(msgspec.Struct):
    layer_types: Types | None = None


class _Config(msgspec.Struct):
    layer_types: Types | None = None
    text_config: _Text | None = None


def other_layers(model_path: str) -> set[str]:
    """Return the ``layer_types`` of a model's configuration besides full attention.

    Empty where the model is no directory of this machine, or its configuration names no types: then they are unknown.
    """
    try:
        with (Path(model_path) / "config.json").open("rb") as file:
            config = msgspec.json.decode(file.read(CONFIG_BYTES_MAX), type=_Config)
    except (OSError, ValueError, msgspec.MsgspecError):
        return set()
    types = config.layer_types or (config.text_config.layer_types if config.text_config else None) or []
    return set(types) - {"full_attention"}


def events_leave_out(layers: set[str]) -> str:
    """Return why events are not followed that say nothing of these layers; empty = there are none."""
    if not layers:
        return ""
    return f"they say nothing of its layers with {', '.join(sorted(layers))}, without which no prompt is resumed"
