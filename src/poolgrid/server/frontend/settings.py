"""What an operator can choose about the OpenAI surface."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from poolgrid.server.frontend.media.settings import MediaSettings
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.frontend.prompt_encoder import CACHE_BYTES_DEFAULT
from poolgrid.server.process.parser_names import (
    ReasoningParser,
    ToolCallParser,
    reasoning_parser_name,
    tool_call_parser_name,
)
from poolgrid.server.process.plugins import ENDPOINTS, has_plugin
from poolgrid.server.process.settings import InputFile

TTFT_TARGET_MS = 2000.0
"""What people wait for a first word before they doubt that anything happens."""

ITL_TARGET_MS = 50.0
"""20 tokens a second: three times as fast as people read."""

NO_TOKENIZER = Path("none")
"""Model path of a router that tokenizes nothing."""

BODY_VALUES_MIN = 327_680
"""Texts, objects and lists that every body may have, and a quarter of its values: a prompt of 1,048,576 token ids."""


class FrontendSettings(MediaSettings):
    """Settings of the OpenAI surface; the router's own settings include them."""

    panel: ClassVar[str] = "HTTP API"

    model_path: Path = Field(
        default=TINY_MODEL_PATH,
        description=(
            "Read tokenizer and chat template from this model directory, or ORG/MODEL of a hub. none = route by text. "
            "Unset = the tiny model of the simulated engine."
        ),
    )
    served_model_name: str = Field(
        default="",
        max_length=256,
        description="Serve the model under this name. Unset = the name of its directory.",
    )
    chat_template: InputFile | None = Field(
        default=None,
        description="Use this Jinja file as the chat template. Unset = the workers' template, else the model's.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description=("Limit a request body; larger ones get 413. Raise it for prompts of more than 262,144 token ids."),
    )
    engine_api_key: str = Field(
        default="",
        max_length=4096,
        description=(
            "Send this API key to the engine servers that requests are forwarded to. Set the environment variable "
            "instead, so that no process list shows it."
        ),
    )
    api_keys: InputFile | None = Field(
        default=None,
        description=(
            "Read API keys and tenants from this JSON file (poolgrid keys create); changes are reloaded. "
            "Unset = no authentication."
        ),
    )
    isolate_tenants: bool = Field(
        default=False,
        description=(
            "Share cached work only between requests with equal tenant_header and cache_salt, also without "
            "API keys, and hide workers from clients."
        ),
    )
    tenant_header: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9-]{1,64})?$",
        description=(
            "Read a request's tenant from this header, for isolate_tenants without API keys. The proxy must "
            "set and overwrite it."
        ),
    )
    metrics_need_key: bool = Field(
        default=False, description="Require an operator's API key for /metrics; needs api_keys."
    )
    ttft_target_ms: float | None = Field(
        default=None,
        ge=0,
        le=86_400_000,
        description=(
            "Count requests within this TTFT for alerts (unset = 2000). On a global router: the target of requests "
            "that name none."
        ),
    )
    itl_target_ms: float | None = Field(
        default=None,
        ge=0,
        le=86_400_000,
        description="The same for the mean time between tokens (unset = 50).",
    )
    keep_alive_interval_s: ClassVar[float] = 15.0
    """A stream that is silent for so long gets a comment: proxies close what is silent for 30 to 60 s."""
    access_log: bool = Field(
        default=False,
        description=(
            "Log one line per inference request at its end: id, status, model, tenant, token counts, times, "
            "worker. Never its text."
        ),
    )
    fleet_page: bool = Field(
        default=True,
        description=(
            "Serve the fleet page, a live view of the pool, at /ui. With API keys it needs an operator's key."
        ),
    )
    tokenizer_threads: ClassVar[int] = 2
    """Threads for long prompts: one long prompt does not delay the next. For more throughput there is http_workers."""
    tokenization_cache_bytes: ClassVar[int] = CACHE_BYTES_DEFAULT
    """Memory for token ids of repeated prompt segments (earlier turns)."""
    response_store_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        le=1024**4,
        description=(
            "Keep responses for previous_response_id in this much space, least recently used out first; on "
            "disk with a data_dir. 0 = keep none."
        ),
    )
    cors_allow_origins: tuple[str, ...] = Field(
        default=(),
        description=(
            "Allow browsers' requests from this origin, or * for any. Repeat for more. Unset = no CORS headers but "
            "those of engine servers."
        ),
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto",
        description=(
            "Choose the format in which the model writes reasoning. auto = the workers' choice, else found "
            "from the model's template."
        ),
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description=(
            "Choose the format in which the model writes tool calls. auto = the workers' choice, else found "
            "from the model's template."
        ),
    )

    @field_validator("reasoning_parser", mode="before")
    @classmethod
    def _reasoning_parser_name(cls, given: object) -> object:
        return reasoning_parser_name(given)

    @field_validator("tool_call_parser", mode="before")
    @classmethod
    def _tool_call_parser_name(cls, given: object) -> object:
        return tool_call_parser_name(given)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether prompts are tokenized here; without it only engine servers can be routed to."""
        return self.model_path != NO_TOKENIZER

    @property
    def max_body_values(self) -> int:
        """Return how many texts, objects and lists a body may have.

        Of objects and lists alone it may have an eighth of that, of all values with its numbers four times as many.

        Parsing ``BODY_VALUES_MIN`` takes some 10 ms, four times as many numbers some 40 ms. A server whose bodies may
        be larger takes more in proportion.
        """
        return max(BODY_VALUES_MIN, self.max_body_bytes // 100)

    @property
    def word_cache(self) -> bool:
        """Return whether the tokenizer may remember words."""
        return not (self.isolate_tenants or self.api_keys is not None)

    @model_validator(mode="after")
    def _tenants_are_told_one_way(self) -> Self:
        if self.tenant_header and (self.api_keys is not None or not self.isolate_tenants):
            raise ValueError(
                f"tenant_header is {self.tenant_header!r}: it is for isolate_tenants without api_keys, which name "
                "tenants themselves; leave it out, or set isolate_tenants"
            )
        return self

    @model_validator(mode="after")
    def _responses_are_kept_by_a_plugin(self) -> Self:
        kept = self.response_store_bytes if "response_store_bytes" in self.model_fields_set else 0
        if kept and not has_plugin(ENDPOINTS, "responses"):
            raise ValueError(
                f"response_store_bytes is {kept}, and the plug-in 'responses' is not installed: leave "
                "response_store_bytes out"
            )
        return self
