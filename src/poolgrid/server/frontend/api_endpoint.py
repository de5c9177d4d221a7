"""The port through which an API joins a front end.

An API is an entry point of the group ``poolgrid.endpoints``. Its name is that of its folder of paths: ``messages`` has
``/v1/messages`` and all below. Where its plug-in is absent, requests for own workers get a 404 that names it; those
for engine servers are forwarded all the same, and placed by their text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple

from msgspec import UNSET, Raw, Struct, UnsetType

from poolgrid.server.frontend.description import ApiDescription
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.process.plugins import ENDPOINTS, has_plugin, load_plugin, plugin_names

FOLDER: Final = "/v1/"
"""Of all APIs."""

Kept = Raw | UnsetType


class PromptFields(Struct, kw_only=True, omit_defaults=True):
    """What makes a prompt in any of the APIs, byte for byte as the client wrote it.

    ``tool_choice`` is not among it: vLLM shows the model its tools also where it must not use them (tried on 0.32).
    """

    model: Kept = UNSET
    cache_salt: Kept = UNSET
    tools: Kept = UNSET
    chat_template_kwargs: Kept = UNSET


class ForwardedPrompt(NamedTuple):
    """How the prompt of a body is read that an engine server gets unchanged."""

    fields: type[Struct]
    """What shapes it: all else is between client and engine."""
    prepare: Callable[[Preparation, bytes], PreparedRequest]
    """Raises ``RequestError``."""


class ApiEndpoint(NamedTuple):
    """One API."""

    join: Callable[[FrontEnd], Mapping[str, InferenceEndpoint]]
    """Adds its other endpoints to the application; returns those of inference by path."""
    description: ApiDescription
    prompts: Mapping[str, ForwardedPrompt]
    """By path, of what engine servers have too."""


@cache
def installed_endpoints() -> tuple[ApiEndpoint, ...]:
    """Return the APIs of the plug-ins that are there; raises ``ValueError`` for one that cannot be loaded."""
    return tuple(load_plugin(ENDPOINTS, name) for name in plugin_names(ENDPOINTS) if has_plugin(ENDPOINTS, name))


def absent_endpoint(path: str) -> str:
    """Return which plug-in a path would need that is not there; empty when it is of none."""
    name = path.removeprefix(FOLDER).partition("/")[0]
    is_absent = path.startswith(FOLDER) and name in plugin_names(ENDPOINTS) and not has_plugin(ENDPOINTS, name)
    return name if is_absent else ""
