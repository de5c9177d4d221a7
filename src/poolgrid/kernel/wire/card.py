"""What a worker declares when it joins a pool, and what its card must look like by itself.

A card is copied into the journal and from there into every router, which connect to the addresses in it and show the
names in it to people. So it is checked in every door that cards come through: the consolidator's, the sources file's,
and the worker's own start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.addresses import PORT_MAX, http_url_problem, ip_endpoint_problem, zmq_endpoint_problem
from poolgrid.kernel.wire.hashing import HASH_SPEC, stable_u64
from poolgrid.kernel.wire.identifiers import U32, Identifier, Role, Text
from poolgrid.kernel.wire.limits import (
    CHAT_TEMPLATE_CHARS_MAX,
    IMAGE_RESOLUTIONS_MAX,
    LORAS_PER_WORKER_MAX,
    MEDIA_KINDS_MAX,
    SERVING_ENDPOINTS_MAX,
    STEP_TIMES_MAX,
    STOP_TOKENS_MAX,
)
from poolgrid.kernel.wire.requests import Sampling

GUIDED_DECODING = "guided_decoding"
"""Stands for every kind of guide; the other names are fields of ``Sampling``."""

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Values that ask for nothing."""

Inability = tuple[Identifier, Text]
"""A field of a request, and the end of a sentence that begins with the field and its value."""

Inabilities = Annotated[tuple[Inability, ...], Meta(max_length=32)]


def is_greedy(sampling: Sampling) -> bool:
    """Return whether nothing is drawn, so that a seed makes no difference."""
    return sampling.temperature == 0 or sampling.top_p == 0 or sampling.top_k == 1


def unmet(sampling: Sampling, inabilities: Iterable[Inability]) -> tuple[str, str] | None:
    """Return the first field of a request that cannot be honoured, with the sentence for its client."""
    for name, why in inabilities:
        if name == GUIDED_DECODING:
            if sampling.guide:
                return sampling.guide, f"{sampling.guide} is set, {why}"
            continue
        value = sampling.value_of(name)
        if value is None or value == NEUTRAL.get(name) or (name == "seed" and is_greedy(sampling)):
            continue
        return name, f"{name} is {value}, {why}"
    return None


def common(cards: Iterable[Sequence[Inability]]) -> tuple[Inability, ...]:
    """Return what none of several workers can do, in the words of the first."""
    first, *others = cards
    return tuple(each for each in first if all(any(each[0] == name for name, _ in other) for other in others))


Length = Annotated[int, Meta(ge=1, le=65_536)]
"""A length in pixels or patches: a divisor, so never 0."""


class WorkerLimits(msgspec.Struct, array_like=True, frozen=True):
    """What one rank of a worker can hold at a time."""

    max_batch_size: U32
    max_num_tokens: U32
    """Tokens in one engine step, prefill chunks included."""
    total_kv_blocks: U32
    max_sequence_length: U32
    host_kv_blocks: U32 = 0


class ResizedGrid(msgspec.Struct, array_like=True, frozen=True):
    """Images are resized to whole patches, and a square of neighbouring patches is one token (Qwen-VL)."""

    patch_size: Length
    """Pixels along a side of a patch."""
    merge_size: Length
    """Patches along a side of a token."""
    pixels_min: U32
    """Smaller images are enlarged to this."""
    pixels_max: U32
    """Larger images are reduced to this."""


class TiledGrid(msgspec.Struct, array_like=True, frozen=True):
    """An image is one small tile, and again several tiles without their empty margin (LLaVA-NeXT)."""

    tile_size: Length
    """Pixels along a side of a tile."""
    patch_size: Length
    """Pixels along a side of a patch, which is one token."""
    resolutions: Annotated[tuple[tuple[Length, Length], ...], Meta(min_length=1, max_length=IMAGE_RESOLUTIONS_MAX)]
    """Height and width in pixels of what the tiles may make up together; the one that fits best is taken."""


class MediaSpec(msgspec.Struct, array_like=True, frozen=True):
    """Which media a model takes, and how they appear among its tokens."""

    kinds: Annotated[tuple[Identifier, ...], Meta(max_length=MEDIA_KINDS_MAX)] = ()
    """``image``, ``embeddings`` (``poolgrid.kernel.wire.multimodal.MediaKind``); empty = text only."""
    placeholder: Identifier = ""
    """How one item is written in the prompt text, e.g. ``<image>``; empty = as the chat template writes it."""
    placeholder_token_id: U32 | None = None
    """The token that the placeholder becomes; ``None`` = not known, or several tokens."""
    tokens_per_image: U32 = 0
    """Tokens that every image takes; 0 = it depends on the image, or is not known."""
    filler_token_id: U32 | None = None
    """The token that stands for an image as many times as it has tokens; ``None`` = the placeholder's own."""
    item_bytes_max: U32 = 0
    """Largest medium, in bytes; 0 = what the routers allow. Theirs holds too."""
    resized_grid: ResizedGrid | None = None
    """How the tokens of an image follow from its size, where it is so; ``tokens_per_image`` goes before."""
    tiled_grid: TiledGrid | None = None
    """The same for models of the other kind; at most one of the two is set."""
    adds_special_tokens: bool = False
    """The engine makes tokens of a prompt with media by itself, and adds what its tokenizer adds to any text."""


class ChatSpec(msgspec.Struct, array_like=True, frozen=True):
    """How chats with a model are written and read, where its workers were configured; empty = the routers find out."""

    reasoning_parser: Identifier = ""
    """Name of a format, or ``none``; routers that do not know it say so, and go by the template."""
    tool_call_parser: Identifier = ""
    chat_template: Annotated[str, Meta(max_length=CHAT_TEMPLATE_CHARS_MAX)] = ""
    """Source in Jinja, in place of the model's own. Of several ranks of a worker the first has it."""

    def filled(self, other: ChatSpec) -> ChatSpec:
        if other == NO_CHAT_SPEC or self == other:
            return self
        return ChatSpec(
            self.reasoning_parser or other.reasoning_parser,
            self.tool_call_parser or other.tool_call_parser,
            self.chat_template or other.chat_template,
        )

    def contradictions(self, other: ChatSpec) -> list[tuple[str, str, str]]:
        """Return each field that both name differently, with this value and the other, as people are shown them."""
        return [
            (name, shown_value(own), shown_value(others))
            for name in self.__struct_fields__
            if (own := getattr(self, name)) and (others := getattr(other, name)) and own != others
        ]


NO_CHAT_SPEC = ChatSpec()


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """How long the engine's steps take, where that is known; routers begin with it and learn what is true."""

    prefill: Annotated[tuple[tuple[U32, float], ...], Meta(max_length=STEP_TIMES_MAX)] = ()
    """Prompt tokens of a step and its milliseconds, by increasing tokens."""
    decode: Annotated[tuple[tuple[float, float], ...], Meta(max_length=STEP_TIMES_MAX)] = ()
    """Share of the KV blocks in use (0 to 1) and milliseconds of a decode step, by increasing share."""


NO_STEP_TIMES = StepTimes()


class WorkerCard(msgspec.Struct, array_like=True, frozen=True):
    """Identity, shape and addresses of a worker; checked by the consolidator before the worker may join."""

    model: Identifier
    """Served model name, as clients write it."""
    role: Role
    block_size: U32
    """Tokens in a KV block."""
    limits: WorkerLimits
    request_endpoint: Identifier
    """ZMQ endpoint of the request plane (a ROUTER socket), e.g. ``tcp://127.0.0.1:40001``."""
    http_endpoint: Identifier = ""
    """URL of the worker's own health and metrics, empty when it has none."""
    hash_spec: Identifier = HASH_SPEC
    loras: Annotated[tuple[Identifier, ...], Meta(max_length=LORAS_PER_WORKER_MAX)] = ()
    dp_size: U32 = 1
    """Data-parallel ranks of this process; each is a routing target of its own."""
    engine: Identifier = ""
    """Engine name and version, for people."""
    eos_token_ids: Annotated[tuple[U32, ...], Meta(max_length=STOP_TOKENS_MAX)] = ()
    vocabulary_size: U32 = 0
    """Token ids are below this; 0 = not known."""
    media: MediaSpec = MediaSpec()
    """Media that it takes; the default takes none."""
    endpoint_name: Identifier = ""
    """``namespace.component.endpoint``: what the worker is called in a deployment; empty = it has no such name."""
    simulated_speedup: float = 0.0
    """How many times faster than real ones its simulated engine is; 0 = it is a real one, or not reported."""
    chat: ChatSpec = NO_CHAT_SPEC
    """How chats with its model are written and read, where it was configured."""
    step_times: StepTimes = NO_STEP_TIMES
    """What its steps take, where that is known."""
    takes_retention: bool = False
    """Its engine takes ``Generate.retention``: how long the blocks of a request stay."""
    serving_endpoints: Annotated[tuple[Identifier, ...], Meta(max_length=SERVING_ENDPOINTS_MAX)] = ()
    """``ip:port`` of the HTTP server that the engine itself has, for gateways that send requests straight there: one
    for each data-parallel rank in their order, or one for all of them; empty = it has none, or that is not known."""
    aliases: Annotated[tuple[Identifier, ...], Meta(max_length=LORAS_PER_WORKER_MAX)] = ()
    """Further names of the model, as clients may write them."""
    inabilities: Inabilities = ()
    """What requests may ask for and the engine cannot do, whatever the worker."""
    decodes_only: bool = False
    """Of a decode worker: its engine continues what prefill workers began, and takes no whole request."""
    server_url: Identifier = ""
    """URL of the engine's own HTTP server, to which routers forward clients' requests as they are; empty = requests
    come over the request plane."""
    server_kind: Identifier = ""
    """What that server is: ``vllm``, ``sglang``, ``trtllm-serve`` or ``openai``."""
    server_version: Identifier = ""
    """Its version as it reports it; empty = not known."""
    cache_events_fault: Text = ""
    """In what its engine's cache events do not fit this card, so that they are of no use; for people."""
    kv_bootstrap_port: Annotated[int, Meta(ge=0, le=PORT_MAX)] = 0
    """Port where decode servers ask a prefill server for the place of its KV; 0 = its engine has no such port."""
    server_ranks: Annotated[tuple[U32, ...], Meta(max_length=SERVING_ENDPOINTS_MAX)] = ()
    """Numbers of its data-parallel ranks, as requests to its server name them; empty = they count from 0."""


SHOWN_CHARS = 60


def shown_value(value: str) -> str:
    """Return a value of a card for people: a long one by its length, its beginning and its digest."""
    if len(value) <= SHOWN_CHARS:
        return repr(value)
    return f"{value[:SHOWN_CHARS]!r}… ({len(value)} characters, xxh3 {stable_u64(value):016x})"


STEP_MS_MAX = 1e9
"""A step that takes longer than eleven days is a mistake."""

SHOWN_CHARS_MAX = 200
"""Characters of a refused value that are repeated in the reason."""


def name_problem(field: str, name: str, needed: bool) -> str | None:
    """Say why a name that people and labels show cannot be used, or ``None``."""
    if needed and not name:
        return f"{field} is empty, allowed are 1 to 256 characters"
    if not name.isprintable():
        return f"{field} is {name[:SHOWN_CHARS_MAX]!r}, allowed are printable characters"
    return None


def _times_problem(part: str, points: tuple[tuple[float, float], ...], least: float, most: float) -> str | None:
    before = -1.0
    for position, (x, ms) in enumerate(points):
        where = f"the card's step_times.{part}[{position}]"
        if not least <= x <= most or x <= before:
            return f"{where} is at {x:g} after {before:g}, allowed are rising values from {least:g} to {most:g}"
        if not 0.0 < ms <= STEP_MS_MAX:
            return f"{where} takes {ms:g} ms, allowed are above 0 to {STEP_MS_MAX:g}"
        before = x
    return None


def card_problem(card: WorkerCard) -> str | None:
    """Name the first field of a card that is wrong, with its value and what is allowed; ``None`` when none is."""
    names = [("model", card.model, True), ("engine", card.engine, False), ("endpoint_name", card.endpoint_name, False)]
    names += [(f"loras[{position}]", lora, True) for position, lora in enumerate(card.loras)]
    names += [(f"aliases[{position}]", alias, True) for position, alias in enumerate(card.aliases)]
    names += [(f"chat.{field}", getattr(card.chat, field), False) for field in ("reasoning_parser", "tool_call_parser")]
    for field, name, needed in names:
        problem = name_problem(f"the card's {field}", name, needed)
        if problem is not None:
            return problem
    problem = _times_problem("prefill", card.step_times.prefill, 0.0, float("inf")) or _times_problem(
        "decode", card.step_times.decode, 0.0, 1.0
    )
    if problem is not None:
        return problem
    if bool(card.step_times.prefill) != bool(card.step_times.decode):
        return "the card's step_times have only one of prefill and decode, allowed are both or neither"
    if card.decodes_only and card.role is not Role.DECODE:
        return f"the card's decodes_only is true with role {card.role.name.lower()}, allowed is role decode"
    if card.block_size < 1:
        return f"the card's block_size is {card.block_size}, allowed are integers from 1"
    problem = zmq_endpoint_problem(card.request_endpoint)
    if problem is not None:
        return (
            f"the card's request_endpoint is {card.request_endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; "
            "allowed is tcp://host:port"
        )
    problem = http_url_problem(card.http_endpoint) if card.http_endpoint else None
    if problem is not None:
        return (
            f"the card's http_endpoint is {card.http_endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; "
            "allowed are http://host:port and https://host:port"
        )
    if card.server_ranks and len(card.server_ranks) != card.dp_size:
        return (
            f"the card's server_ranks are {len(card.server_ranks)} and its dp_size is {card.dp_size}, allowed are as "
            "many, or none"
        )
    problem = http_url_problem(card.server_url) if card.server_url else None
    if problem is not None:
        return (
            f"the card's server_url is {card.server_url[:SHOWN_CHARS_MAX]!r}, which {problem}; "
            "allowed are http://host:port and https://host:port"
        )
    return _serving_problem(card)


def _serving_problem(card: WorkerCard) -> str | None:
    """Say what is wrong with where the engine's own server is, or ``None``."""
    if len(card.serving_endpoints) not in (0, 1, card.dp_size):
        return (
            f"the card's serving_endpoints are {len(card.serving_endpoints)} and its dp_size is {card.dp_size}: "
            "allowed are none, one for all ranks, and one for each"
        )
    for position, endpoint in enumerate(card.serving_endpoints):
        problem = ip_endpoint_problem(endpoint)
        if problem is not None:
            return (
                f"the card's serving_endpoints[{position}] is {endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; allowed "
                "are ip:port and [ipv6]:port"
            )
    return None
