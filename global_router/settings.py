"""What can be set on a global router process; the pools and the grid are in the document that ``config`` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from poolgrid.kernel.wire.addresses import http_url_problem, is_name, parse_name, without_credentials
from poolgrid.server.process.settings import InputFile
from poolgrid.server.serving.router_settings import ServingSettings


@dataclass(frozen=True, slots=True)
class Timings:
    """Times that no deployment had to change; tests do."""

    status_interval_ms: float = 250
    """Between two questions to a pool's router how its pool is."""
    status_timeout_ms: float = 2_000
    """Age of a pool's last status from which on the pool counts as down, and its router is looked for again: several
    status intervals, so that one late answer is no failure."""
    select_timeout_ms: float = 1_000
    """Longest wait for a pool's router to select a worker; then the next pool is asked. A selection takes below 1 ms,
    so only a router that hangs is ever this late."""
    probe_timeout_ms: float = 50
    """Longest wait for the pools to report what they have cached (``isl_basis`` uncached); a pool that is later counts
    as having nothing."""
    connect_timeout_ms: float = 1_000
    """Longest wait for a connection to a worker; then another worker is asked for."""
    link_idle_ms: float = 600_000
    """A connection to a worker that was not used this long is closed."""
    move_timeout_ms: float = 10_000
    """How long a request whose worker was lost may wait for a pool with room, before all new requests."""
    reload_interval_ms: float = 1_000
    """Between two looks whether the document's file has changed; SIGHUP has it read at once."""


TIMINGS = Timings()


class GlobalRouterSettings(ServingSettings):
    """Pools' health, dispatch, reload and HTTP of one global router."""

    panel: ClassVar[str] = "Pools"

    config: InputFile = Field(
        description="Read the pools and their grids from this pool-grid document (docs/global_router.md#pool-grids)."
    )
    pool_url: tuple[str, ...] = Field(
        (),
        max_length=512,
        description=(
            "Find a pool's router at NAME=URL or NAME=dyn://..., instead of the document's url. Repeat for more."
        ),
    )
    pool_api_key: InputFile | None = Field(
        None, description="Read an operator's API key for the pools' routers from this file."
    )
    pool_ca: InputFile | None = Field(
        None,
        description="Trust the authorities in this PEM file for the pools' https URLs. Unset = the system's.",
    )
    local_prefill_max_tokens: int = Field(
        0,
        ge=0,
        le=4_194_304,
        description=(
            "In a disaggregated fleet, serve prompts of at most this many tokens in the decode pool; 0 = only "
            "without a prefill pool."
        ),
    )

    @field_validator("pool_url")
    @classmethod
    def _name_and_url(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            name, _, url = value.partition("=")
            if name and is_name(url):
                parse_name(url)
                continue
            if not name or not url.startswith(("http://", "https://")):
                raise ValueError(f"{without_credentials(value)!r} is not of the form NAME=http://host:port")
            problem = http_url_problem(url)
            if problem is not None:
                shown = without_credentials(url)
                raise ValueError(f"the url of {name!r} is {shown!r}, which {problem}; allowed is http://host:port")
        return values

    def pool_urls(self) -> dict[str, str]:
        return {name: url.rstrip("/") for name, _, url in (value.partition("=") for value in self.pool_url)}

    @model_validator(mode="after")
    def _check_pool_names(self) -> Self:
        for name, url in self.pool_urls().items():
            self.check_named(f"pool_url of {name}", url)
        return self
