"""What a check of an engine server is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from poolgrid.server.process.settings import InputFile, Settings, ZmqEndpoint
from poolgrid.server.workers.engines.registry import server_kinds

SOURCES_MAX = 256
"""Endpoints that are followed at a time: more ranks than a server has."""

Name = Annotated[str, StringConstraints(max_length=256)]


AUTO = "auto"

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[(AUTO, *(name for name, kind in server_kinds().items() if kind.owned_by))]


class EngineCheckSettings(Settings):
    """A check, or the judgement of a recorded one."""

    panel: ClassVar[str] = "Check"

    url: str = Field("", max_length=2048, description="Check the engine server at this URL, http://HOST:PORT.")
    engine: KindName = Field(AUTO, description="Set the kind of the server; auto = detect it.")
    kv_events_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=SOURCES_MAX,
        description=(
            "Subscribe to events at this ZMQ endpoint. Repeat for each data-parallel rank. Unset = as the "
            "server reports."
        ),
    )
    kv_events_replay_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=SOURCES_MAX,
        description="Request replays at this ZMQ endpoint. Repeat for each rank. Unset = as the server reports.",
    )
    model: Name = Field("", description="Request this model. Unset = the first that the server lists.")
    kv_block_size: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="Expect this many tokens in a KV block. Unset = as the server or its events report.",
    )
    lora: Name = Field("", description="Also send probes to this LoRA adapter of the server.")
    out: Path | None = Field(None, description="Record all traffic in this file, for --recorded and for bug reports.")
    recorded: InputFile | None = Field(None, description="Judge this recording instead of a server.")
    as_json: bool = Field(False, description="Print the findings as JSON instead of a table.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.url and self.recorded is None:
            raise ValueError("url is not given: name a server, or a --recorded check")
        replays, endpoints = len(self.kv_events_replay_endpoint), len(self.kv_events_endpoint)
        if replays not in (0, endpoints):
            raise ValueError(
                f"kv_events_replay_endpoint is given {replays} times and kv_events_endpoint {endpoints} times: give "
                "one for each, in the same order"
            )
        return self
