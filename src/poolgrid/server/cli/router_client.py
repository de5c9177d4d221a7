"""How commands reach a router: its address, also by name, the API key that they send, and refusals.

A router is given by name as ``--url dyn://namespace.router.http``. Commands find it as processes do, by
``POOLGRID_NAMES`` and what goes with it in the environment. The name is looked up when they start; a command that
continues looks it up again when the router it found no longer answers. Of several processes the one that began last is
taken, of those that can be connected to: one that was killed has its name until its lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from poolgrid.kernel.wire.addresses import is_name, parse_name, without_credentials
from poolgrid.server.cli.command_line import API_KEY_VARIABLE
from poolgrid.server.cli.options import environment_name

if TYPE_CHECKING:
    from poolgrid.server.discovery.settings import DiscoverySettings

KEY_NOTE = f"A router that takes API keys asks for one here too: put an operator's key into {API_KEY_VARIABLE}."
"""Help text of commands that contact a router."""


def api_key_headers() -> dict[str, str]:
    """Return the headers of a request to a router; none without ``POOLGRID_API_KEY``."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def key_hint(status: int) -> str:
    """Return what to do about a refusal with ``status``, to be added to it; empty when no key would help."""
    if status == 401:
        had = "the key in it is not one of the router's" if api_key_headers() else "it is not set"
        return f": the router takes API keys; put an operator's key into {API_KEY_VARIABLE} ({had})"
    if status == 403:
        return (
            f": the key in {API_KEY_VARIABLE} is no operator's (poolgrid keys create FILE TENANT --operator makes one)"
        )
    return ""


def refusal(status: int, body: bytes) -> str:
    """Return why a router refused a request, in its own words where it has any, and what to do about it."""
    try:
        words = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        words = body[:200].decode(errors="replace").strip()
    return (words or f"status {status}") + key_hint(status)


CONNECT_TIMEOUT_S = 1.0
"""How long one of several that have a name may take to take a connection; on the same network it takes milliseconds."""

DEFAULT_PORTS = {"http": 80, "https": 443}

SETTINGS_OF = {"directory": ("names_dir",), "nats": ("nats_",), "kubernetes": ("kubernetes_",)}
"""Which settings each kind of names has, by what their names begin with."""


def found_url(url: str) -> str:
    """Return a URL as it is, or that of a name; raises ``click.BadParameter``."""
    if not is_name(url):
        return url
    try:
        return asyncio.run(url_of(url))
    except (ValueError, OSError) as error:
        raise click.BadParameter(f"url is {without_credentials(url)}: {error}") from None


async def url_of(url: str) -> str:
    """Return a URL as it is, or that of a name; raises ``ValueError`` or ``OSError`` when nothing is found there."""
    if not is_name(url):
        return url
    found = await _urls_of(url)
    if len(found) == 1:
        return found[0]
    take_calls = await asyncio.gather(*map(_takes_connections, found))
    return next((each for each, takes in zip(found, take_calls, strict=True) if takes), found[0])


async def other_url_of(url: str, silent: str) -> str:
    """Return the URL of a name of which one is known that does not answer: another one, where there is one; raises as
    ``url_of`` does."""
    return next((each for each in await _urls_of(url) if each != silent), silent)


async def _takes_connections(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme])
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _urls_of(url: str) -> list[str]:
    """Return all that have a name, the latest first, and at least one."""
    name = parse_name(url)
    settings = _settings(url)
    # Imported when they are used: most commands are given URLs.
    from poolgrid.server.discovery.directory import open_discovery
    from poolgrid.server.discovery.registry import Registry, Scope
    from poolgrid.server.process.clock import SystemClock

    clock = SystemClock()
    async with AsyncExitStack() as opened:
        names = await open_discovery(opened, settings, clock)
        registry = Registry()
        registry.look(await names.store.look([Scope(name.namespace, name.component)]), clock.monotonic_ms())
        where = names.store.where
    found = registry.addresses(name)
    if not found:
        raise ValueError(f"no process has that name at {where}")
    if not found[0].startswith(("http://", "https://")):
        raise ValueError(f"that is {found[0]}, which is not HTTP; the endpoint of a router is http")
    return found


def _settings(url: str) -> DiscoverySettings:
    """Return the service discovery of the environment; raises ``ValueError``."""
    variable = environment_name("names")
    kind = os.environ.get(variable, "none")
    if kind not in SETTINGS_OF:
        raise ValueError(
            f"{variable} is {kind}, so nothing knows where {without_credentials(url)} is: set it to "
            f"{', '.join(SETTINGS_OF)}, with what the router has of names, or give http://HOST:PORT"
        )
    from poolgrid.server.discovery.settings import DiscoverySettings

    given: dict[str, object] = {"names": kind}
    for field, about in DiscoverySettings.model_fields.items():
        value = os.environ.get(environment_name(field))
        if value is not None and field.startswith(SETTINGS_OF[kind]):
            given[field] = tuple(value.split()) if isinstance(about.get_default(), tuple) else value
    return DiscoverySettings.model_validate(given)
