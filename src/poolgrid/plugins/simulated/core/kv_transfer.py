"""How the simulated engine hands a prompt's KV from a prefill worker to a decode worker.

The prefill engine writes a *ticket* (``disaggregated_params``, opaque to everyone between), keeps the blocks and
answers for them with an *offer* (``poolgrid.kernel.wire.requests.KvOffered``). The decode engine takes the blocks only
when ticket and offer name exactly what its own token ids need: a wrong block would be a wrong answer, so it is an error
instead. No bytes move; the time that moving them would take does pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.hashing import pack_hashes, unpack_tokens
from poolgrid.kernel.wire.identifiers import U32, U64, Identifier
from poolgrid.kernel.wire.requests import Generate, KvOffered
from poolgrid.kernel.worker_protocol.refusal import BrokenError, RefusedError
from poolgrid.plugins.simulated.core.media import MediaMark
from poolgrid.plugins.simulated.core.sequence import Sequence

KV_BYTES_PER_TOKEN_DEFAULT = 131_072
"""Llama-3.1-8B in 16 bit: key and value, 32 layers, 8 KV heads of 128 values, 2 bytes each."""

KV_TRANSFER_GIGABYTES_PER_S_DEFAULT = 64.0
"""One 512 Gb/s link, or PCIe 5.0 x16 in one direction: what a GPU reaches across hosts today."""

KV_TRANSFER_LATENCY_MS_DEFAULT = 1.0
"""Handshake and set-up of one transfer, whatever its size."""

KV_TRANSFER_TIMEOUT_MS_DEFAULT = 10_000.0
"""How long blocks are kept without a reader: well above the time in which a router finds a decode worker and that
worker asks (milliseconds, seconds under load), and as long as a silent router keeps its lease; blocks that are held
longer than that have been forgotten, and a prefill pool full of them stands still."""

TIMEOUT_MS_MAX = 3_600_000.0

KEPT_TRANSFERS_MAX_DEFAULT = 256
"""As many as may run: a decode pool that has not fetched a whole batch by now is behind, and more prompts would only
fill this worker's cache with blocks that cannot be evicted."""


@dataclass(frozen=True, slots=True)
class TransferModel:
    """How long moving KV takes, and how long and for how many requests it is kept."""

    latency_ms: float = KV_TRANSFER_LATENCY_MS_DEFAULT
    gigabytes_per_s: float = KV_TRANSFER_GIGABYTES_PER_S_DEFAULT
    """10^9 bytes per second."""
    bytes_per_token: int = KV_BYTES_PER_TOKEN_DEFAULT
    timeout_ms: float = KV_TRANSFER_TIMEOUT_MS_DEFAULT
    kept_max: int = KEPT_TRANSFERS_MAX_DEFAULT

    def __post_init__(self) -> None:
        for name, lowest in (("latency_ms", 0), ("bytes_per_token", 1), ("timeout_ms", 1), ("kept_max", 1)):
            if not getattr(self, name) >= lowest:
                raise ValueError(
                    f"modelling transfers: {name} is {getattr(self, name)}, allowed are {lowest} and above"
                )
        if not self.gigabytes_per_s > 0:
            raise ValueError(f"modelling transfers: gigabytes_per_s is {self.gigabytes_per_s}, allowed are above 0")

    def bytes_of(self, sequence: Sequence) -> int:
        return sequence.moved_blocks * sequence.block_size * self.bytes_per_token

    def duration_ms(self, moved_bytes: int) -> float:
        return self.latency_ms + moved_bytes / (self.gigabytes_per_s * 1e6)


@dataclass(frozen=True, slots=True)
class KvSource:
    """Who offers KV: one life of one worker."""

    endpoint: str = ""
    """Its request plane."""
    worker_id: str = ""
    epoch: int = 0


class KvTicket(msgspec.Struct, array_like=True, frozen=True):
    """What ``disaggregated_params`` holds, private to simulated engines of this version."""

    transfer_id: Identifier
    endpoint: Annotated[str, Meta(min_length=1, max_length=256)]
    worker_id: Identifier
    epoch: U64
    block_size: U32
    isl: U32
    first_token: U32
    prompt_digest: U64
    last_hash: U64 | None
    """Sequence hash of the last whole block of the prompt."""
    timeout_ms: Annotated[float, Meta(ge=1.0, le=TIMEOUT_MS_MAX)]
    """The source keeps the blocks this long after it was last asked for them."""
    media: tuple[MediaMark, ...] = ()
    """The media of the prompt, which a decode leg comes without."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KvTicket)


def write_ticket(sequence: Sequence, source: KvSource, timeout_ms: float) -> bytes:
    """Return the disaggregation parameters of a sequence whose first token exists."""
    whole = sequence.isl // sequence.block_size
    return _encoder.encode(
        KvTicket(
            transfer_id=sequence.transfer_id,
            endpoint=source.endpoint,
            worker_id=source.worker_id,
            epoch=source.epoch,
            block_size=sequence.block_size,
            isl=sequence.isl,
            first_token=unpack_tokens(bytes(sequence.stream.output[:4]))[0],
            prompt_digest=_digest(sequence),
            last_hash=sequence.hashes[whole - 1] if whole else None,
            timeout_ms=timeout_ms,
            media=sequence.marks,
        )
    )


def read_ticket(request: Generate) -> KvTicket:
    """Return what a request's disaggregation parameters say; raises ``RefusedError`` when they say nothing."""
    packed = request.disaggregated_params
    if packed is None:
        raise RefusedError(
            f"request {request.request_id!r} asks for the decode stage without disaggregated_params; they come with "
            "the last delta of the prefill stage"
        )
    try:
        return _decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusedError(
            f"the disaggregated_params of request {request.request_id!r} are not those of a simulated engine ({error})"
        ) from None


def make_offer(sequence: Sequence) -> KvOffered:
    """Return what is kept of a sequence."""
    whole = sequence.isl // sequence.block_size
    return KvOffered(
        sequence.transfer_id, True, pack_hashes(sequence.hashes[:whole]), sequence.isl % sequence.block_size
    )


def check_offer(sequence: Sequence, ticket: KvTicket, offer: KvOffered) -> None:
    """Raise ``RefusedError`` unless the offered blocks are those of this sequence's prompt, first token included."""
    who = f"worker {ticket.worker_id} (transfer {ticket.transfer_id})"
    if offer.transfer_id != ticket.transfer_id:
        raise RefusedError(f"{who} answered for transfer {offer.transfer_id!r}")
    if not offer.known:
        raise BrokenError(f"{who} no longer keeps the KV of this request")
    whole = sequence.isl // sequence.block_size
    stream = sequence.stream
    stream.generate_to(1)
    for what, named, needed in (
        ("block size", ticket.block_size, sequence.block_size),
        ("prompt length", ticket.isl, sequence.isl),
        ("digest of the prompt", ticket.prompt_digest, _digest(sequence)),
        ("last sequence hash", ticket.last_hash, sequence.hashes[whole - 1] if whole else None),
        ("number of blocks", len(offer.sequence_hashes) // 8, whole),
        ("tokens beyond whole blocks", offer.tail_tokens, sequence.isl % sequence.block_size),
        ("first token", ticket.first_token, unpack_tokens(bytes(stream.output[:4]))[0]),
    ):
        if named != needed:
            raise RefusedError(f"{who} offers the KV of another prompt: {what} is {named}, this request needs {needed}")
    if offer.sequence_hashes != pack_hashes(sequence.hashes[:whole]):
        raise RefusedError(
            f"{who} offers the KV of another prompt: its {whole} sequence hashes are not those of this request"
        )


def _digest(sequence: Sequence) -> int:
    return xxh3_64_intdigest(sequence.prompt, sequence.seed)
