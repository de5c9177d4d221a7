"""What an operator can choose about the OpenAI surface."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from poolgrid.frontend.media.settings import MediaSettings
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_encoder import CACHE_BYTES_DEFAULT
from poolgrid.wire.output_parsers import ReasoningParser, ToolCallParser, parser_name

TTFT_TARGET_MS = 2000.0
"""What people wait for a first word before they doubt that anything happens."""

ITL_TARGET_MS = 50.0
"""20 tokens a second: three times as fast as people read."""


class FrontendSettings(MediaSettings):
    """Settings of the OpenAI surface; the router's own settings include them."""

    model_path: Path = Field(
        default=TINY_MODEL_PATH,
        description="Hugging Face style model directory (tokenizer.json, tokenizer_config.json, config.json). "
        "The default is the tiny directory that ships for the simulated engine.",
    )
    model_name: str = Field(
        default="",
        max_length=256,
        description="Name that clients ask for; empty = the name of the model directory.",
    )
    chat_template: Path | None = Field(
        default=None,
        description="Jinja file to use in place of the model's own chat template; empty = the one that workers were "
        "given, else the model's.",
    )
    template_time_limit_ms: float = Field(
        default=2000.0,
        gt=0,
        le=60_000,
        description="Longest rendering of a chat template, answered 400 above it: a hundred times what a conversation "
        "of 10,000 messages takes.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Largest request body; larger ones get 413. 32 MiB is above the 32 MB that Anthropic's API takes: "
        "conversations of agents with screenshots reach 12 MiB and more. Parsing 32 MiB of text blocks other requests "
        "for about 20 ms.",
    )
    max_body_values: int = Field(
        default=327_680,
        ge=1024,
        le=16_777_216,
        description="Values in one request body (numbers, texts, objects), and an eighth as many objects and lists, "
        "and members of objects; 413 above it. Parsing so many takes some 10 ms, in which nobody else has a turn. It "
        "holds a prompt of 262,144 token ids; a server for longer ones needs more. Text is one value, however long.",
    )
    api_keys: Path | None = Field(
        default=None,
        description="JSON file of API keys and tenants (`poolgrid keys create`); without it anybody may ask. It is "
        "read again when it changes.",
    )
    api_keys_check_ms: float = Field(
        default=1000,
        ge=0,
        le=3_600_000,
        description="Least time between two looks whether the file of API keys has changed; a look is one stat.",
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
    guide_compile_limit_ms: float = Field(
        default=250.0,
        ge=10,
        le=60_000,
        description="CPU time that a guide (schema, grammar, expression) may take to compile and to begin an answer "
        "with, tried in a process of its own before any worker sees it; 400 above it. A schema of a thousand "
        "properties takes 70 ms, nearly all take 5.",
    )
    guide_step_limit_ms: float = Field(
        default=25.0,
        ge=1,
        le=60_000,
        description="CPU time that one token of an answer under a guide may take to find, in the same trial; 400 above "
        "it. An engine finds it between two steps of everybody's answers. The first token of a schema of a thousand "
        "properties takes 5 ms, nearly all take 0.1.",
    )
    guide_check_queue: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Guides that may wait to be tried, 16 of one tenant; 503 beyond. A hundred usual ones take a "
        "second.",
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
    fleet_page_interval_ms: float = Field(
        default=250.0,
        ge=50,
        le=60_000,
        description="Least time between two changes that the viewers of the fleet page are sent; a pool so large that "
        "putting one together takes more than a fifth of it is shown less often.",
    )
    fleet_page_viewers: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Viewers of the fleet page at a time, of one process; one more is answered 503. A change is made "
        "once for all of them.",
    )
    tokenizer_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that tokenize long prompts beside the event loop. Two, so that one 60k-token prompt "
        "does not hold up the next while the event loop keeps a core.",
    )
    tokenizer_inline_bytes: int = Field(
        default=4096,
        ge=0,
        le=1024 * 1024,
        description="Prompts of which up to this many bytes of text are new are tokenized on the event loop (about "
        "1 ms); others go to a tokenizer thread, whose hand-over costs about 0.15 ms. 16 times this where fastokens "
        "does the work.",
    )
    tokenization_cache_bytes: int = Field(
        default=CACHE_BYTES_DEFAULT,
        ge=0,
        le=1024**4,
        description="Memory for the token ids of prompt segments that come again (earlier turns of a conversation); "
        "0 tokenizes everything each time.",
    )
    fast_tokenizer: bool = Field(
        default=True,
        description="Use the fastokens package where it is installed and agrees with tokenizers on every probe.",
    )
    tokenizer_queue: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Long prompts that may wait for a tokenizer thread; one more is answered 429. 256 prompts of "
        "8k tokens are a few seconds of work for two threads.",
    )
    response_store_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=0,
        le=1024**4,
        description="Room for responses that clients may go on from (store, previous_response_id): in memory, with a "
        "data_dir in a file there. Beyond it whole conversations are forgotten, the one used longest ago first, each "
        "tenant's within an equal part. 0 keeps none. 64 MiB are some thousand conversations of agents.",
    )
    response_store_ttl_s: float = Field(
        default=30 * 86_400,
        gt=0,
        le=10 * 365 * 86_400,
        description="How long a conversation is kept after its last use; OpenAI keeps them for 30 days.",
    )
    max_choices: int = Field(
        default=128,
        ge=1,
        le=1024,
        description="Most sequences that one request may ask for (prompts times n); OpenAI's own limit of n is 128.",
    )
    max_stop_strings: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Most stop strings of one request. OpenAI allows 4; agents send more; every one is searched for "
        "in every chunk.",
    )
    max_stop_chars: int = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Longest stop string: it is also the most text that a stream may hold back.",
    )
    max_prompt_chars: int = Field(
        default=32 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Most characters that a chat template may render; a template that loops is stopped there.",
    )
    keep_alive_interval_s: float = Field(
        default=15.0,
        ge=0,
        le=3600,
        description="A stream that was silent for so long carries a comment, which clients skip and proxies take for a "
        "sign of life; 0 = never. Read time-outs are 30 s and more.",
    )
    gzip_request_members: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Most gzip members that a compressed request body may have, answered 413 above it. bgzip writes "
        "one for each 64 KiB, most else one in all.",
    )
    gzip_request_ratio: float = Field(
        default=100.0,
        ge=1,
        le=1100,
        description="How many times as long a compressed request body may be inflated, beyond the first MiB; answered "
        "413 above it. Text of chats comes to some 3 to 10; 1,032 is the most that gzip can do.",
    )
    gzip_request_timeout_ms: float = Field(
        default=5000.0,
        gt=0,
        le=3_600_000,
        description="Longest time a compressed request body may take to inflate, answered 413 above it. The largest "
        "honest ones take 150 ms on an idle core.",
    )
    gzip_response_bytes: int = Field(
        default=4096,
        ge=0,
        le=1024 * 1024 * 1024,
        description="Whole answers of at least so many bytes are sent as gzip to clients that take it; 0 = never. "
        "Shorter ones fit into a few packets anyway. Streams are never compressed.",
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
