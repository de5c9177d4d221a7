"""Encode and decode everything that crosses a socket or lies on disk: msgpack, typed, bounded.

Two rules:

* Decoding untrusted bytes either returns a valid value or raises ``DecodeError``, nothing else, in time and memory in
  proportion to the bytes given: a frame above ``FRAME_BYTES_MAX`` is refused before it is read, a length that a frame
  merely claims is never allocated, and nesting ends where the message types end.
* Encoding a value of our own that breaks a limit raises ``LimitError`` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from poolgrid.kernel.wire.errors import DecodeError, LimitError
from poolgrid.kernel.wire.events import AnyEvent, EventBatch, JournalRecord
from poolgrid.kernel.wire.feed import FromFeed, SnapshotPart, ToFeed
from poolgrid.kernel.wire.ingest import FromConsolidator, Leader, LoadingWorker, LoadingWorkers, ToConsolidator
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.kernel.wire.multimodal import FromTensorSource, MultimodalInput, TensorList, ToTensorSource
from poolgrid.kernel.wire.requests import FromWorker, Generate, KvOffered, TokenBatch, ToWorker
from poolgrid.kernel.wire.selection import FromPool, Probe, Select, ToPool

T = TypeVar("T")
_encoder: Final = msgspec.msgpack.Encoder()


class Codec(Generic[T]):
    """Encoder and decoder of one message family."""

    def __init__(self, what: str, type_: Any, check: Callable[[Any], str | None]) -> None:
        self._what = what
        self._type = type_
        self._check = check

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Any]:
        """Made when it is first used: a process reads few of the families, and all take a twentieth of its start."""
        return msgspec.msgpack.Decoder(self._type)

    def encode(self, value: T) -> bytes:
        frame = _encoder.encode(value)
        if len(frame) > FRAME_BYTES_MAX:
            raise LimitError(f"the size of {self._what}", len(frame), FRAME_BYTES_MAX)
        return frame

    def decode(self, frame: bytes | memoryview) -> T:
        """Return the message of a frame, or raise ``DecodeError``."""
        if len(frame) > FRAME_BYTES_MAX:
            raise DecodeError(self._what, f"{len(frame)} bytes, allowed are at most {FRAME_BYTES_MAX}")
        try:
            value = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            # ValueError covers broken UTF-8; RecursionError a skipped unknown field that nests too deep.
            raise DecodeError(self._what, str(error) or type(error).__name__) from None
        check = self._check
        fault = check(value)
        if fault is not None:
            raise DecodeError(self._what, fault)
        decoded: T = value
        return decoded


def _no_check(_value: Any) -> str | None:
    return None


def _check_hashes(packed: bytes, where: str) -> str | None:
    if len(packed) % 8:
        return f"{where}: {len(packed)} bytes of hashes, allowed are multiples of 8"
    return None


def _check_tokens(packed: bytes, where: str) -> str | None:
    if len(packed) % 4:
        return f"{where}: {len(packed)} bytes of token ids, allowed are multiples of 4"
    return None


_PACKED_EVENTS: Final = frozenset(kind for kind in get_args(AnyEvent) if "sequence_hashes" in kind.__struct_fields__)


def _check_events(value: EventBatch | JournalRecord) -> str | None:
    for event in value.events:
        kind = type(event)
        if kind in _PACKED_EVENTS and len(event.sequence_hashes) % 8:  # type: ignore[union-attr]
            return _check_hashes(event.sequence_hashes, f"{kind.__name__}.sequence_hashes")  # type: ignore[union-attr]
    return None


def _check_to_worker(value: ToWorker) -> str | None:
    if isinstance(value, Generate):
        if value.retention is not None and value.retention.fault:
            return f"Generate.retention: {value.retention.fault}"
        return _check_tokens(value.token_ids, "Generate.token_ids")
    return None


def _check_from_worker(value: FromWorker) -> str | None:
    if isinstance(value, TokenBatch):
        for delta in value.deltas:
            if len(delta.token_ids) % 4:
                return _check_tokens(delta.token_ids, "TokenDelta.token_ids")
    elif isinstance(value, KvOffered):
        return _check_hashes(value.sequence_hashes, "KvOffered.sequence_hashes")
    return None


def _check_from_feed(value: FromFeed) -> str | None:
    if isinstance(value, SnapshotPart):
        for _, chain in value.chains:
            fault = _check_hashes(chain.sequence_hashes, "BlockChain.sequence_hashes")
            if fault is not None:
                return fault
    return None


def _check_to_pool(value: ToPool) -> str | None:
    if isinstance(value, Select):
        return _check_hashes(value.sequence_hashes, "Select.sequence_hashes") or _check_hashes(
            value.media_hashes, "Select.media_hashes"
        )
    if isinstance(value, Probe):
        return _check_hashes(value.sequence_hashes, "Probe.sequence_hashes")
    return None


event_batch: Codec[EventBatch] = Codec("an event batch", EventBatch, _check_events)
journal_record: Codec[JournalRecord] = Codec("a journal record", JournalRecord, _check_events)
to_worker: Codec[ToWorker] = Codec("a message to a worker", ToWorker, _check_to_worker)
from_worker: Codec[FromWorker] = Codec("a message from a worker", FromWorker, _check_from_worker)
to_consolidator: Codec[ToConsolidator] = Codec("a message to the consolidator", ToConsolidator, _no_check)
from_consolidator: Codec[FromConsolidator] = Codec("a message from the consolidator", FromConsolidator, _no_check)
to_feed: Codec[ToFeed] = Codec("a request to the feed", ToFeed, _no_check)
from_feed: Codec[FromFeed] = Codec("an answer of the feed", FromFeed, _check_from_feed)
to_pool: Codec[ToPool] = Codec("a message to a pool", ToPool, _check_to_pool)
from_pool: Codec[FromPool] = Codec("an answer of a pool", FromPool, _no_check)
multimodal: Codec[MultimodalInput] = Codec("the media of a request", MultimodalInput, _no_check)
loading_worker: Codec[LoadingWorker] = Codec("the report of a worker that loads", LoadingWorker, _no_check)
loading_workers: Codec[LoadingWorkers] = Codec("the workers that load", LoadingWorkers, _no_check)
leader: Codec[Leader] = Codec("the entry of a leader", Leader, _no_check)
tensor_list: Codec[TensorList] = Codec("the tensors of a request", TensorList, _no_check)
to_tensor_source: Codec[ToTensorSource] = Codec("a message to a tensor's source", ToTensorSource, _no_check)
from_tensor_source: Codec[FromTensorSource] = Codec("an answer of a tensor's source", FromTensorSource, _no_check)
