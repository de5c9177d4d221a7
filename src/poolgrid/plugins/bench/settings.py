"""Settings of ``poolgrid bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from poolgrid.kernel.wire.addresses import http_url_problem, is_name, without_credentials
from poolgrid.server.process.plugins import policy_names
from poolgrid.server.process.settings import InputFile, Settings

ISL_DEFAULT = 1024
OSL_DEFAULT = 64

COMPARISON_ROUNDS = 3
"""Rounds of a comparison without a given number: the least with a median."""


def _listed(value: Any) -> Any:
    """Take ``1,4,16``, a number, or several such words."""
    items = value if isinstance(value, tuple | list) else [value]
    return [word.strip() for item in items for word in str(item).split(",") if word.strip()]


Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Levels = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65_536)], ...], Field(min_length=1, max_length=64), BeforeValidator(_listed)
]


class BenchSettings(Settings):
    """Load against any OpenAI endpoint: a closed loop or a replay (``trace``)."""

    panel: ClassVar[str] = "Workload"

    url: Words = Field(
        ("http://127.0.0.1:8000",),
        min_length=1,
        description=(
            "Measure this endpoint, with or without /v1. Separate several by commas to compare them with the "
            "same prompts, in alternation."
        ),
    )
    model: str | None = Field(None, description="Request this model. Unset = the first that the endpoint lists.")
    policies: Words = Field(
        (),
        examples=list(policy_names()),
        description=(
            "Compare these routing policies instead of --url, each in a pool of simulated workers that bench starts."
        ),
    )
    pool_options: str = Field("", description="Start those pools with these options of poolgrid up, in quotes.")
    rounds: int | None = Field(
        None, ge=1, le=1000, description="Repeat everything this often. Unset = 3 in a comparison, otherwise 1."
    )
    endpoint: Literal["completions", "text", "chat"] | None = Field(
        None,
        description=(
            "Call completions with token ids, completions with text, or chat. Unset = completions, or chat "
            "for conversations."
        ),
    )
    ignore_eos: bool = Field(
        True, description="Request outputs of exactly --osl tokens. OpenAI's own API does not know this field."
    )

    trace: InputFile | None = Field(None, description="Replay this Mooncake-format trace at its own arrival times.")
    speed: float = Field(1.0, gt=0, le=1e6, description="Replay the trace this many times faster.")
    length_scale: float = Field(
        1.0,
        ge=1 / 512,
        le=100,
        description="Multiply prompt and output lengths of the trace; sharing stays the same.",
    )

    concurrency: Levels = Field(
        (8,),
        description=(
            "Keep this many requests or conversations in flight (closed loop); several levels (1,4,16) run "
            "one after the other."
        ),
    )
    turns: int = Field(
        1, ge=1, le=1000, description="Send this many turns per conversation, each with its whole history."
    )
    think_time_s: float = Field(
        0.0, ge=0, le=86_400, description="Pause between turns for exponential times of this mean."
    )
    shared_prefix: int = Field(
        0,
        ge=0,
        le=2**22,
        description="Begin each prompt with a shared system prompt of this many tokens, in addition to --isl.",
    )
    isl: int | None = Field(
        None,
        ge=1,
        le=2**22,
        description=(
            "Set the prompt length in tokens; per turn in conversations, an upper limit in replays. Unset = 1024."
        ),
    )
    osl: int | None = Field(
        None,
        ge=1,
        le=2**22,
        description="Set the output length in tokens; an upper limit in replays. Unset = 64.",
    )

    requests: int | None = Field(
        None, ge=1, le=10**9, description="Send this many requests. Unset = 100, or the whole trace."
    )
    duration_s: float | None = Field(None, gt=0, le=10**7, description="Stop sending requests after this time.")
    start_timeout_ms: float = Field(
        10_000.0, ge=0, le=86_400_000, description="Give up when the endpoint is not ready after this time."
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Seed arrivals and prompts; equal seeds send equal requests.")
    as_json: bool = Field(False, description="Print the report to standard output as JSON instead of a table.")
    out: Path | None = Field(
        None,
        description="Write the report as JSON to this file.",
    )

    @field_validator("url")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not is_name(url) and (problem := http_url_problem(url)):
                allowed = "http://HOST[:PORT], https://HOST[:PORT] and dyn:// names"
                raise ValueError(f"{without_credentials(url)!r} {problem}; allowed are {allowed}")
        return urls

    @model_validator(mode="after")
    def _consistent(self) -> BenchSettings:
        if self.policies and "url" in self.model_fields_set:
            raise ValueError("policies and url are both given, allowed is one of them: policies start pools here")
        if self.pool_options and not self.policies:
            raise ValueError("pool_options are of the pools that policies start: none are given")
        if self.turns > 1 and self.trace is not None:
            raise ValueError("trace and turns are both given, allowed is one of them: a trace has its own requests")
        if self.shared_prefix and self.trace is not None:
            raise ValueError("trace and shared_prefix are both given: a trace already defines what its requests share")
        if self.turns > 1 and self.endpoint in ("completions", "text"):
            raise ValueError(f"turns is {self.turns} and endpoint is {self.endpoint}: conversations need chat")
        if len(self.concurrency) > 1 and self.mode != "closed":
            raise ValueError(f"concurrency has {len(self.concurrency)} values: only a closed loop has a concurrency")
        return self

    @property
    def mode(self) -> str:
        """``replay`` or ``closed``."""
        return "closed" if self.trace is None else "replay"

    @property
    def api(self) -> str:
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
        return self.endpoint == "text" or self.api == "chat"

    @property
    def compares(self) -> bool:
        return len(self.url) > 1 or len(self.policies) > 1

    @property
    def rounds_run(self) -> int:
        return self.rounds or (COMPARISON_ROUNDS if self.compares else 1)
