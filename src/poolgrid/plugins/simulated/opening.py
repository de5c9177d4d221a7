"""Opens the simulated engine of a worker: of the role's kind, with its ends of transfers between workers.

The words that the simulated engine writes: tokens of a model's tokenizer that survive decoding and encoding.

Clients read text and may tokenize it again: to count it, or to send it back as part of a conversation, where its blocks
are in the cache only if it becomes the same tokens. So the engine writes ordinary words with a space before them, which
tokenizers look at one by one, and of those only such as come back as they were.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from poolgrid.kernel.wire.card import NO_STEP_TIMES, MediaSpec, WorkerCard, WorkerLimits
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.tasks import MODALITIES
from poolgrid.plugins.simulated.core.kv_transfer import KvSource
from poolgrid.plugins.simulated.encode import EncodeLimits, SimulatedEncodeEngine
from poolgrid.plugins.simulated.guides import LazyGuides
from poolgrid.plugins.simulated.real_time import RealTimeSimulatedEngine
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.server.workers.engines.definition import EngineHost, OpenedEngine, close_in_order
from poolgrid.server.workers.engines.tasks import TaskEngine, TaskMaker, task_card
from poolgrid.server.workers.tensor_transfer.opening import open_tensor_transfer
from poolgrid.server.workers.timing import ScaledTiming, TimingModel, step_times_of, timing_model
from poolgrid.server.workers.transfers import EmbeddingExchange, EmbeddingFetcher, KvExchange, KvFetcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

WORDS_MAX = 4096
"""Words that are used, those of the lowest ids: vocabularies list the commonest first, and no text needs more."""

WORDS_MIN = 2
"""Fewer are no text: whether a token was lost would not show."""

_SPACED_WORD = re.compile("[\u0120\u2581 ][A-Za-z]{2,}")
"""A word with a space before it, as byte-level vocabularies write that, as SentencePiece does, or as it is."""


class TokenizerWords(NamedTuple):
    """What is known of a model's tokenizer."""

    words: tuple[int, ...] = ()
    size: int = 0
    """Its tokens, added ones included; 0 = it could not be read."""
    end: int | None = None
    """The token that ends an output, where the model's directory says so."""


def read_words(path: Path) -> TokenizerWords:
    """Return the tokens that come back from their text in any order, lowest first, and how many tokens there are.

    ``path`` is a model directory or its ``tokenizer.json``. Without words, with a warning, where the tokenizer cannot
    be read or has no such tokens. Takes some 20 ms, and 1 s for 200,000 tokens.
    """
    # Only here: a worker that was not given the model's tokenizer does not need it in its memory.
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        # The text and not the path, which would be taken for a name to download if there were no such file.
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        log.warning("the answers will not be words: the tokenizer at %s cannot be used: %s", file, str(error)[:500])
        return TokenizerWords()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = _words(tokenizer)
    if len(words) < WORDS_MIN:
        log.warning("the answers will not be words: the tokenizer at %s has no words that survive encoding", file)
        words = ()
    return TokenizerWords(words, tokenizer.get_vocab_size(), _end(file.parent))


def _end(directory: Path) -> int | None:
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return None
    first = found[0] if isinstance(found, list) and found else found
    return first if type(first) is int and first >= 0 else None


def _words(tokenizer: Tokenizer) -> tuple[int, ...]:
    added = tokenizer.get_added_tokens_decoder()
    spaced = sorted(
        token_id
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
        if token_id not in added and _SPACED_WORD.fullmatch(token)
    )
    words = []
    for token_id in spaced:
        # Twice: the first token of a text may lose its space, and what follows a word may be cut in another way.
        if _survives(tokenizer, [token_id, token_id]):
            words.append(token_id)
            if len(words) == WORDS_MAX:
                break
    return tuple(words) if _survives(tokenizer, words + words[::-1]) else ()


def _survives(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    encoded: list[int] = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False).ids
    return encoded == token_ids


if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

LOAD_STEP_S = 0.25
"""How often a load says how far it is; what is said goes out once a second."""


@asynccontextmanager
async def open_engine(settings: SimulatedWorkerSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Open the engine of the worker's role.

    Raises ``TableError`` when the timing table cannot be used, ``OSError`` when a port cannot be bound, and
    ``NixlMissing``.
    """
    await _load(settings, around)
    stage = MODALITIES.get(settings.modality)
    if stage is not None:
        opening = _open_tasks(settings, around, stage)
    else:
        opening = _open_encode(settings, around) if settings.role == "encode" else _open_whole(settings, around)
    async with opening as opened:
        yield opened


@asynccontextmanager
async def _open_tasks(
    settings: SimulatedWorkerSettings, around: EngineHost, stage: Stage
) -> AsyncIterator[OpenedEngine]:
    # Late: workers of tokens need no arrays.
    from poolgrid.plugins.simulated.tasks import SimulatedDiffusion, SimulatedEmbeddings

    kind = SimulatedEmbeddings if stage is Stage.EMBEDDING else SimulatedDiffusion
    maker: TaskMaker = kind(settings.speedup)
    engine = TaskEngine(stage, maker)
    card = task_card(
        stage,
        settings.served_model_name,
        "simulated",
        maker.concurrency,
        f"tcp://{settings.advertised_host}:{around.request_port}",
        f"{settings.http_scheme}://{settings.advertised_host}:{around.http_port}",
    )
    try:
        yield OpenedEngine(engine, card)
    finally:
        await engine.close()


async def _load(settings: SimulatedWorkerSettings, around: EngineHost) -> None:
    """Take as long as weights would, and say how many are still to come."""
    began_ms = around.clock.monotonic_ms()
    while (past_ms := around.clock.monotonic_ms() - began_ms) < settings.load_ms:
        around.start.move(int(settings.load_bytes * past_ms / settings.load_ms), settings.load_bytes)
        await asyncio.sleep(min(LOAD_STEP_S, (settings.load_ms - past_ms) / 1e3))


def make_timing(settings: SimulatedWorkerSettings) -> TimingModel:
    """Return the step times; raises ``TableError`` when the table cannot be used."""
    model = timing_model(settings.timing)
    return model if settings.speedup == 1.0 else ScaledTiming(model, settings.speedup)


def make_tensor_transfer(settings: SimulatedWorkerSettings, around: EngineHost) -> TensorTransfer | None:
    """Return this worker's end of tensor transfers, ``None`` for a text-only one.

    Raises ``OSError`` when the port cannot be bound, ``NixlMissing``.
    """
    if settings.modality == "text":
        return None
    return open_tensor_transfer(settings, settings.tensor_transport, around)


async def _with_tokenizer(settings: SimulatedWorkerSettings) -> tuple[SimulatedWorkerSettings, TokenizerWords]:
    """Return settings that say how many token ids there are, and what is known of the tokenizer."""
    path = settings.tokenizer_path
    # In a thread: a large tokenizer takes a second, in which probes are answered.
    found = TokenizerWords() if path is None else await asyncio.to_thread(read_words, path)
    if settings.vocabulary_size is None and found.size:
        settings = settings.model_copy(update={"vocabulary_size": found.size})
    return settings, found


@asynccontextmanager
async def _open_encode(settings: SimulatedWorkerSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Open the simulated encode engine; raises what ``make_tensor_transfer`` raises."""
    settings, _ = await _with_tokenizer(settings)
    tensors = make_tensor_transfer(settings, around)
    assert tensors is not None, "an encode worker is multimodal"
    limits = EncodeLimits(
        max_waiting_requests=settings.max_waiting_requests, ms_per_image=settings.encode_ms_per_image / settings.speedup
    )
    try:
        engine = SimulatedEncodeEngine(limits, tensors, around.clock)
        yield OpenedEngine(engine, make_card(settings, around.request_port, around.http_port))
    finally:
        await tensors.close()


@asynccontextmanager
async def _open_whole(settings: SimulatedWorkerSettings, around: EngineHost) -> AsyncIterator[OpenedEngine]:
    """Open the simulated engine.

    Raises ``TableError`` when the timing table cannot be used, and what ``make_tensor_transfer`` raises.
    """
    settings, found = await _with_tokenizer(settings)
    timing = make_timing(settings)
    vocabulary = settings.vocabulary(found.words, found.end)
    card = make_card(settings, around.request_port, around.http_port, timing, vocabulary.eos_token_id)
    path = settings.tokenizer_path
    engine = RealTimeSimulatedEngine(
        settings.engine_limits(),
        vocabulary,
        timing,
        around.clock,
        settings.transfer_model(),
        KvSource(card.request_endpoint, settings.worker_id, around.epoch),
        settings.modality == "multimodal",
        None if path is None else LazyGuides(path, vocabulary),
    )
    fetches_max = settings.max_waiting_requests + settings.max_batch_size
    async with AsyncExitStack() as opened:
        tensors = make_tensor_transfer(settings, around)
        embeddings = None
        if tensors is not None:
            opened.push_async_callback(tensors.close)
            embeddings = EmbeddingFetcher(tensors, fetches_max)
            opened.push_async_callback(embeddings.close)
        fetcher = KvFetcher(around.context, settings.kv_fetch_timeout_ms, fetches_max, around.awake, around.metrics)
        close_in_order(opened, fetcher.close)
        yield OpenedEngine(
            engine,
            card,
            KvExchange(engine, fetcher),
            None if embeddings is None else EmbeddingExchange(engine, embeddings),
        )


ENGINE_NAME = "poolgrid-simulated"


def make_card(
    settings: SimulatedWorkerSettings,
    request_port: int,
    http_port: int,
    timing: TimingModel | None = None,
    eos_token_id: int = SimulatedWorkerSettings.eos_token_id,
) -> WorkerCard:
    """Return the worker's card, with the ports it got; an encode worker has no ``timing``."""
    host = settings.advertised_host
    return WorkerCard(
        model=settings.served_model_name,
        role=settings.card_role,
        block_size=settings.kv_block_size,
        limits=WorkerLimits(
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            total_kv_blocks=settings.total_kv_blocks,
            max_sequence_length=settings.max_seq_len,
            host_kv_blocks=settings.host_kv_blocks,
        ),
        request_endpoint=f"tcp://{host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{host}:{http_port}",
        loras=settings.lora,
        engine=ENGINE_NAME,
        eos_token_ids=(eos_token_id,),
        vocabulary_size=settings.token_ids,
        media=media_spec(settings),
        simulated_speedup=settings.speedup,
        step_times=NO_STEP_TIMES if timing is None else step_times_of(timing),
        takes_retention=True,
    )


def media_spec(settings: SimulatedWorkerSettings) -> MediaSpec:
    """Return the media part of the card."""
    if settings.modality == "text":
        return MediaSpec()
    # The simulated engine's own placeholder and filler: no tokenizer needs to know them.
    return MediaSpec(("image", "embeddings"), "<image>", None, settings.tokens_per_image, 0)
