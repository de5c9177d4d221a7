"""What a check of an engine server is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from poolgrid.process.settings import InputFile, Settings, ZmqEndpoint

SOURCES_MAX = 256
"""Endpoints that are followed at a time: more ranks than a server has."""

Name = Annotated[str, StringConstraints(max_length=256)]


class EngineCheckSettings(Settings):
    """A check, or the judgement of a recorded one."""

    panel: ClassVar[str] = "Check"

    url: str = Field("", max_length=2048, description="The engine server's HTTP address, http://HOST:PORT.")
    engine: Literal["auto", "vllm", "sglang", "trtllm-serve"] = Field(
        "auto", description="Kind of the server; auto asks it."
    )
    events: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=SOURCES_MAX,
        description="ZMQ endpoint of the events, once for each data-parallel rank in their order; without it the "
        "server is asked for them.",
    )
    replay: tuple[ZmqEndpoint, ...] = Field(
        (), max_length=SOURCES_MAX, description="ZMQ endpoint of the replays, likewise."
    )
    model: Name = Field("", description="Model to ask for; empty takes the first that the server names.")
    block_size: int | None = Field(
        None, ge=1, le=65_536, description="Tokens in a KV block; without it the server is asked, or its events are."
    )
    lora: Name = Field("", description="Also send probes to this LoRA adapter, which the server must know.")
    record: Path | None = Field(
        None, description="Write all that was sent and heard to this file, for --recorded and for reports of errors."
    )
    recorded: InputFile | None = Field(
        None, description="Judge such a file; nothing is sent, and of the other options only those of output count."
    )
    as_json: bool = Field(False, description="Print the findings and figures as JSON, and no table.")
    measure_timing: Path | None = Field(
        None,
        description="Instead of checking events, measure the server's step times and write a table for "
        "--timing-table to this file.",
    )
    concurrency: int = Field(
        32, ge=1, le=4096, description="Most requests that decode together while steps are measured."
    )
    kv_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that the server's KV blocks hold, of which a table gives shares; without it the server's "
        "metrics are asked.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.url and self.recorded is None:
            raise ValueError("url is not given: name a server, or a --recorded check")
        if self.replay and len(self.replay) != len(self.events):
            raise ValueError(
                f"replay is given {len(self.replay)} times and events {len(self.events)} times: give one for each, in "
                "the same order"
            )
        return self
