"""What ``poolgrid bench`` can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from poolgrid.process.plugins import policy_names
from poolgrid.process.settings import InputFile, Settings

ISL_DEFAULT = 1024
OSL_DEFAULT = 64

COMPARISON_ROUNDS = 3
"""Rounds of a comparison that was told no number: the least with a median."""


def _listed(value: Any) -> Any:
    """Take ``1,4,16``, a number, or several such words."""
    items = value if isinstance(value, tuple | list) else [value]
    return [word.strip() for item in items for word in str(item).split(",") if word.strip()]


Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Levels = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(min_length=1, max_length=64), BeforeValidator(_listed)
]


class BenchSettings(Settings):
    """Load against any OpenAI endpoint: a closed loop, an open loop (``rate``) or a replay (``trace``)."""

    panel: ClassVar[str] = "Workload"

    url: Words = Field(
        ("http://127.0.0.1:8000",),
        min_length=1,
        description="Endpoint to measure, with or without a trailing /v1. Several, separated by commas, are compared: "
        "all get the same prompts, in turns, round after round.",
    )
    model: str | None = Field(None, description="Model to ask for; by default the first that the endpoint lists.")
    policies: Words = Field(
        (),
        examples=list(policy_names()),
        description="In place of url: compare these routing policies, each in a pool of simulated workers that is "
        "started for it.",
    )
    pool_options: str = Field("", description="Options of poolgrid up for the pools of policies, in quotes.")
    rounds: int | None = Field(
        None, ge=1, le=1000, description="How often everything is run; 3 in a comparison, otherwise 1."
    )
    endpoint: Literal["completions", "text", "chat"] | None = Field(
        None,
        description="API to call: completions with token ids, completions with text for endpoints that take no token "
        "arrays, or chat. By default completions, and chat for conversations.",
    )
    ignore_eos: bool = Field(
        True, description="Ask for answers of exactly the wanted length (a field that OpenAI itself does not know)."
    )

    trace: InputFile | None = Field(None, description="Replay this Mooncake-format trace at its own arrival times.")
    speed: float = Field(1.0, gt=0, le=1e6, description="Replay: how much faster than the trace.")
    length_scale: float = Field(
        1.0, ge=1 / 512, le=100, description="Replay: multiplies prompt and answer lengths; sharing stays the same."
    )

    rate: float | None = Field(None, gt=0, le=1e6, description="Open loop: requests per second, come what may.")

    concurrency: Levels = Field(
        (8,), description="Closed loop: requests (or conversations) at a time; several (1,4,16) are run one by one."
    )
    turns: int = Field(
        1, ge=1, le=1000, description="Closed and open loop: times that a user asks, each with all that was said."
    )
    think_time_s: float = Field(
        0.0, ge=0, le=86_400, description="Mean of the exponential pauses before a user asks again."
    )
    shared_prefix: int = Field(
        0, ge=0, le=2**22, description="Tokens of a system prompt that requests share, before their isl."
    )
    shared_prefixes: int = Field(1, ge=1, le=10**6, description="Different system prompts; each request has one.")
    isl: int | None = Field(
        None,
        ge=1,
        le=2**22,
        description="Prompt tokens, by default 1024; of conversations those of each question. Of a replay the longest "
        "prompt: longer ones are cut.",
    )
    osl: int | None = Field(
        None,
        ge=1,
        le=2**22,
        description="Tokens to generate, by default 64. Of a replay the longest answer.",
    )

    requests: int | None = Field(
        None, ge=1, le=10**9, description="Requests to send: 100 by default, all rows of a trace in a replay."
    )
    duration_s: float | None = Field(None, gt=0, le=10**7, description="Seconds after which no new request is sent.")
    warmup: int = Field(0, ge=0, le=10**6, description="Requests that are sent before anything is measured.")
    ready_timeout_s: float = Field(
        10.0, ge=0, le=86_400, description="How long to wait until the endpoint's /ready says that it can serve."
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Of arrivals and prompts; the same seed sends the same.")
    as_json: bool = Field(False, description="Print the report to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the report to this file too, as JSON.")
    logs: Path | None = Field(
        None, description="Also write report, table, settings and a line for each request into this directory."
    )

    @model_validator(mode="after")
    def _consistent(self) -> BenchSettings:
        if self.trace is not None and self.rate is not None:
            raise ValueError("trace and rate are both given, allowed is one of them: a trace has its own arrival times")
        if self.policies and "url" in self.model_fields_set:
            raise ValueError("policies and url are both given, allowed is one of them: policies start pools here")
        if self.pool_options and not self.policies:
            raise ValueError("pool_options are of the pools that policies start: none are given")
        if self.turns > 1 and self.trace is not None:
            raise ValueError("trace and turns are both given, allowed is one of them: a trace has its own requests")
        if self.shared_prefix and self.trace is not None:
            raise ValueError("trace and shared_prefix are both given: a trace says itself what its requests share")
        if self.turns > 1 and self.endpoint in ("completions", "text"):
            raise ValueError(f"turns is {self.turns} and endpoint is {self.endpoint}: conversations need chat")
        if len(self.concurrency) > 1 and self.mode != "closed":
            raise ValueError(f"concurrency has {len(self.concurrency)} values: only a closed loop has a concurrency")
        return self

    @property
    def mode(self) -> str:
        """``replay``, ``open`` or ``closed``."""
        if self.trace is not None:
            return "replay"
        return "open" if self.rate is not None else "closed"

    @property
    def api(self) -> str:
        """``completions`` or ``chat``."""
        return "chat" if self.endpoint == "chat" or self.turns > 1 else "completions"

    @property
    def prompt_tokens(self) -> int:
        return ISL_DEFAULT if self.isl is None else self.isl

    @property
    def output_tokens(self) -> int:
        return OSL_DEFAULT if self.osl is None else self.osl

    @property
    def converses(self) -> bool:
        return self.trace is None and (self.turns > 1 or self.shared_prefix > 0)

    @property
    def writes_words(self) -> bool:
        """Whether prompts are words and not token ids."""
        return self.endpoint == "text" or self.api == "chat"

    @property
    def compares(self) -> bool:
        return len(self.url) > 1 or len(self.policies) > 1

    @property
    def rounds_run(self) -> int:
        return self.rounds or (COMPARISON_ROUNDS if self.compares else 1)
