"""What an operator can choose about the OpenAI surface."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from poolgrid.frontend.media.settings import MediaSettings
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_encoder import CACHE_BYTES_DEFAULT
from poolgrid.process.settings import InputFile
from poolgrid.wire.card import ReasoningParser, ToolCallParser, parser_name

TTFT_TARGET_MS = 2000.0
"""What people wait for a first word before they doubt that anything happens."""

ITL_TARGET_MS = 50.0
"""20 tokens a second: three times as fast as people read."""

BODY_VALUES_MIN = 327_680
"""Values that every body may have: a prompt of 262,144 token ids."""


class FrontendSettings(MediaSettings):
    """Settings of the OpenAI surface; the router's own settings include them."""

    panel: ClassVar[str] = "HTTP API"

    model_path: Path = Field(
        default=TINY_MODEL_PATH,
        description="Hugging Face style model directory (tokenizer.json, tokenizer_config.json, config.json), or "
        "ORG/MODEL on a hub, fetched without weights. The default is the tiny directory that ships for the simulated "
        "engine.",
    )
    model_name: str = Field(
        default="",
        max_length=256,
        description="Name that clients ask for; empty = the name of the model directory.",
    )
    chat_template: InputFile | None = Field(
        default=None,
        description="Jinja file to use in place of the model's own chat template; empty = the one that workers were "
        "given, else the model's.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Largest request body; larger ones get 413. 32 MiB is above the 32 MB that Anthropic's API takes: "
        "conversations of agents with screenshots reach 12 MiB and more. Parsing 32 MiB of text blocks other requests "
        "for about 20 ms. Raise it for prompts of more than 262,144 token ids too.",
    )
    api_keys: InputFile | None = Field(
        default=None,
        description="JSON file of API keys and tenants (`poolgrid keys create`); without it anybody may ask. It is "
        "read again when it changes.",
    )
    isolate_tenants: bool = Field(
        default=False,
        description="Tell clients apart without API keys too: a request shares cached work only with those that have "
        "the same tenant-header and cache_salt, and one that has neither shares with none; the server then keeps no "
        "prompts, paths or media of its own. With or without keys, answers do not say which worker served and why, "
        "refusals do not say what others use, and /metrics needs an operator's key where there are keys.",
    )
    tenant_header: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9-]{1,64})?$",
        description="Header that names the tenant of a request, for isolate-tenants without API keys, e.g. "
        "x-tenant-id. A proxy must set it, and overwrite what clients send; empty = none.",
    )
    share_word_cache: bool = Field(
        default=False,
        description="With API keys or isolate-tenants, let the tokenizer remember words of all tenants, and use "
        "fastokens where it can be: new text is tokenized 20 to 80 times as fast, and tenants that time their requests "
        "can tell which words others have sent. Without both this is always so.",
    )
    metrics_need_key: bool = Field(
        default=False, description="Whether /metrics needs an operator's key; only with --api-keys."
    )
    ttft_target_ms: float = Field(
        default=TTFT_TARGET_MS,
        gt=0,
        le=86_400_000,
        description="TTFT that sequences are to have; poolgrid_frontend_target_judgements_total says how many do, and "
        "alerts on the error budget count them.",
    )
    itl_target_ms: float = Field(
        default=ITL_TARGET_MS,
        gt=0,
        le=86_400_000,
        description="Mean time between tokens that a sequence is to have; judged and counted in the same way.",
    )
    access_log: bool = Field(
        default=False,
        description="Log a line for each inference request when it ends: its id, status, model, tenant, token counts, "
        "times and worker, never its text. It is written whatever the log level.",
    )
    fleet_page: bool = Field(
        default=True,
        description="Serve the fleet page at /ui: the pool live, for a browser. It only shows; what it shows needs an "
        "operator's key where there are keys. It costs nothing while nobody looks.",
    )
    tokenizer_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that tokenize long prompts beside the event loop. Two, so that one 60k-token prompt "
        "does not hold up the next while the event loop keeps a core.",
    )
    tokenization_cache_bytes: int = Field(
        default=CACHE_BYTES_DEFAULT,
        ge=0,
        le=1024**4,
        description="Memory for the token ids of prompt segments that come again (earlier turns of a conversation); "
        "0 tokenizes everything each time.",
    )
    response_store_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        le=1024**4,
        description="Room for responses that clients may go on from (store, previous_response_id): in memory, with a "
        "data_dir in a file there. Beyond it whole conversations are forgotten, the one used longest ago first, each "
        "tenant's within an equal part. 0 keeps none. 64 MiB are some thousand conversations of agents.",
    )
    cors_allow_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins of web pages that may call the API from a browser, or *; none = no CORS headers.",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto",
        description="Which format's reasoning is told apart from content; auto = what the workers were told, else from "
        "the model's template and tokens.",
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="In which format the model writes tool calls; auto = what the workers were told, else from the "
        "model's template and tokens.",
    )

    @field_validator("reasoning_parser", "tool_call_parser", mode="before")
    @classmethod
    def _parser_name(cls, given: object) -> object:
        return parser_name(given)

    @property
    def max_body_values(self) -> int:
        """Return how many values (numbers, texts, objects) a body may have, and eight times as many as containers.

        Parsing ``BODY_VALUES_MIN`` takes some 10 ms. A server whose bodies may be larger takes more in proportion.
        """
        return max(BODY_VALUES_MIN, self.max_body_bytes // 100)

    @property
    def word_cache(self) -> bool:
        """Return whether the tokenizer may remember words."""
        return self.share_word_cache or not (self.isolate_tenants or self.api_keys is not None)

    @model_validator(mode="after")
    def _tenants_are_told_one_way(self) -> Self:
        if self.tenant_header and (self.api_keys is not None or not self.isolate_tenants):
            raise ValueError(
                f"tenant_header is {self.tenant_header!r}: it is for isolate_tenants without api_keys, which name "
                "tenants themselves; leave it out, or set isolate_tenants"
            )
        return self
