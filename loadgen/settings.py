"""What ``poolgrid bench`` can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from poolgrid.runtime.settings import Settings


class BenchSettings(Settings):
    """Load against any OpenAI endpoint: a closed loop, an open loop (``rate``) or a replay (``trace``)."""

    url: str = Field("http://127.0.0.1:8000", description="Endpoint to measure, with or without a trailing /v1.")
    model: str | None = Field(None, description="Model to ask for; by default the first that the endpoint lists.")
    api_key: str | None = Field(None, description="Sent as a bearer token.")
    endpoint: Literal["completions", "chat"] = Field("completions", description="Which API to call.")
    text: bool = Field(False, description="Send words instead of token ids, for endpoints that take no token arrays.")
    ignore_eos: bool = Field(
        True, description="Ask for answers of exactly the wanted length (a field that OpenAI itself does not know)."
    )

    trace: Path | None = Field(None, description="Replay this Mooncake-format trace at its own arrival times.")
    speed: float = Field(1.0, gt=0, le=1e6, description="Replay: how much faster than the trace.")
    length_scale: float = Field(
        1.0, ge=1 / 512, le=100, description="Replay: multiplies prompt and answer lengths; sharing stays the same."
    )
    isl_max: int | None = Field(None, ge=1, le=2**22, description="Replay: longest prompt; longer ones are cut.")
    osl_max: int | None = Field(None, ge=1, le=2**22, description="Replay: longest answer.")

    rate: float | None = Field(None, gt=0, le=1e6, description="Open loop: requests per second, come what may.")
    arrivals: Literal["poisson", "fixed"] = Field("poisson", description="Open loop: how arrivals are spaced.")

    concurrency: int = Field(8, ge=1, le=65_536, description="Closed loop: requests in flight.")
    isl: int = Field(1024, ge=1, le=2**22, description="Closed and open loop: prompt tokens.")
    osl: int = Field(64, ge=1, le=2**22, description="Closed and open loop: tokens to generate.")

    requests: int | None = Field(
        None, ge=1, le=10**9, description="Requests to send: 100 by default, all rows of a trace in a replay."
    )
    duration_s: float | None = Field(None, gt=0, le=10**7, description="Seconds after which no new request is sent.")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Of arrivals and prompts; the same seed sends the same.")
    max_in_flight: int = Field(
        900,
        ge=1,
        le=65_536,
        description="Open loop and replay: requests at once (below the usual limit of 1,024 open files); "
        "a request beyond it waits, which is counted and part of its times.",
    )
    connect_timeout_s: float = Field(10.0, gt=0, le=3600, description="Seconds to wait for a connection.")
    request_timeout_s: float = Field(600.0, gt=0, le=86_400, description="Seconds to wait for a whole answer.")
    token_id_min: int = Field(16, ge=0, le=2**31, description="Smallest token id in prompts (special ones lie below).")
    token_id_max: int = Field(
        255, ge=1, le=2**31, description="Largest token id in prompts; every byte-level vocabulary reaches this."
    )
    as_json: bool = Field(False, description="Print the report to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the report to this file too, as JSON.")

    @model_validator(mode="after")
    def _consistent(self) -> BenchSettings:
        if self.trace is not None and self.rate is not None:
            raise ValueError("trace and rate are both given, allowed is one of them: a trace has its own arrival times")
        if self.token_id_max <= self.token_id_min:
            raise ValueError(
                f"token_id_max is {self.token_id_max}, allowed are values above token_id_min ({self.token_id_min})"
            )
        return self

    @property
    def mode(self) -> str:
        """``replay``, ``open`` or ``closed``."""
        if self.trace is not None:
            return "replay"
        return "open" if self.rate is not None else "closed"
