"""Requests of a trace as the chats they may have been: turns of users and assistants, later ones extending earlier.

A trace row has lengths and one id per 512 tokens, which names the whole prefix up to there. From that, chats are made:

Rules
    1. A block id has one content, made when it is first seen: what text stands in it, and where messages begin. Rows
       that share leading ids share that text and these messages, as the rows' clients did.
    2. The first block, which all rows share, is the system message. What follows in a row that extends no other is one
       message of the user.
    3. A row *extends* an earlier one when it begins with all of that row's whole blocks and is longer than that row.
       Then it has that row's messages unchanged, an assistant's message as long as that row's answer (as far as there
       is room), and a new message of the user.
    4. A row whose ids end within an assistant's message of another ends with a message of the user all the same.
    5. Conversations are chosen whole, so the share of later turns is the trace's. Rows outside the bounds of length
       take part in the making of contents and are left out of the requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.benchmarks.chat_text import ChatText
from poolgrid.plugins.bench.trace import TRACE_BLOCK_TOKENS, TraceRow

USER_TOKENS_MIN = 8
"""Shortest new message of a user that is told from a row that only grew."""

MESSAGE_TOKENS = 5
"""What a chat template puts around each message, and the text is shorter by."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a block that belongs to one message."""

    role: str
    opens: bool
    """Whether a message begins here."""
    seed: str
    tokens: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a conversation."""

    row: int
    """Line in the trace, from 0."""
    conversation: int
    isl: int
    """What the trace says."""
    osl: int
    messages: tuple[tuple[str, str], ...]
    """Role and text."""
    block_ids: tuple[int, ...]
    is_later_turn: bool
    """Whether all messages of an earlier request are at its beginning."""


@dataclass(slots=True)
class _Layouts:
    """What stands in each block, for all rows so far."""

    blocks: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    ends: dict[int, list[TraceRow]] = field(default_factory=dict)
    """Last whole block of rows: the rows."""

    def lay_out(self, row: TraceRow) -> list[Segment]:
        """Return the segments of a row, and remember those of blocks that are new."""
        ids = row.hash_ids
        known = 0
        while known < len(ids) and ids[known] in self.blocks:
            known += 1
        if known < len(ids):
            self._fill(row, known)
        whole = row.input_length // TRACE_BLOCK_TOKENS
        if whole >= 2:
            self.ends.setdefault(ids[whole - 1], []).append(row)
        return cut_to([segment for block in ids for segment in self.blocks[block]], row.input_length)

    def _fill(self, row: TraceRow, known: int) -> None:
        ids = row.hash_ids
        extended = self._extended(row, known)
        plan: list[tuple[str, bool, int]] = []
        taken: list[Segment] = []
        place = known * TRACE_BLOCK_TOKENS
        if known == 0:
            plan.append(("system", True, TRACE_BLOCK_TOKENS))
        elif extended is not None:
            tail = extended.input_length - place
            taken = cut_to(self.blocks[extended.hash_ids[known]], tail) if tail else []
            answer = min(extended.output_length, row.input_length - extended.input_length - USER_TOKENS_MIN)
            if answer > 0:
                plan.append(("assistant", True, answer))
        last = taken[-1].role if taken else self.blocks[ids[known - 1]][-1].role if known else ""
        # Whoever does not extend the message of a user begins one.
        plan.append(("user", bool(plan) or last != "user", len(ids) * TRACE_BLOCK_TOKENS))
        self._store(ids[known:], taken, plan)

    def _extended(self, row: TraceRow, known: int) -> TraceRow | None:
        """Return the longest row whose whole blocks are just the known ones, and which is shorter."""
        found = self.ends.get(row.hash_ids[known - 1], []) if known >= 2 else []
        shorter = [each for each in found if each.input_length < row.input_length]
        return max(shorter, key=lambda each: each.input_length, default=None)

    def _store(self, ids: Sequence[int], taken: Iterable[Segment], plan: Sequence[tuple[str, bool, int]]) -> None:
        """Give the new blocks first what was taken from an extended row, then what was planned."""
        steps = list(plan)
        current = list(taken)
        for block in ids:
            left = TRACE_BLOCK_TOKENS - sum(segment.tokens for segment in current)
            while left > 0:
                role, opens, tokens = steps[0]
                size = min(left, tokens)
                current.append(Segment(role, opens, f"{block}/{len(current)}", size))
                left -= size
                if size == tokens:
                    steps.pop(0)
                else:
                    steps[0] = (role, False, tokens - size)
            self.blocks[block] = tuple(current)
            current = []


def cut_to(segments: Iterable[Segment], tokens: int) -> list[Segment]:
    """Return the first ``tokens`` tokens of segments."""
    found = []
    for segment in segments:
        if tokens <= 0:
            break
        size = min(tokens, segment.tokens)
        found.append(Segment(segment.role, segment.opens, segment.seed, size))
        tokens -= size
    return found


def choose_conversations(rows: Sequence[TraceRow], requests: int, isl_min: int, isl_max: int, seed: int) -> set[int]:
    """Return conversations (``conversation_of``), drawn at random, with about ``requests`` requests in the bounds."""
    sizes: dict[int, int] = {}
    for row in rows:
        if isl_min <= row.input_length <= isl_max:
            name = conversation_of(row)
            sizes[name] = sizes.get(name, 0) + 1
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    chosen: set[int] = set()
    total = 0
    for name in order:
        if total >= requests:
            break
        chosen.add(name)
        total += sizes[name]
    return chosen


def conversation_of(row: TraceRow) -> int:
    """Return the block after the one that all rows share."""
    return row.hash_ids[1] if len(row.hash_ids) > 1 else -1


def chat_requests(
    rows: Sequence[TraceRow], writer: ChatText, *, requests: int, isl_min: int, isl_max: int, seed: int = 0
) -> list[ChatRequest]:
    """Return about ``requests`` requests in the trace's order, with prompts of ``isl_min`` to ``isl_max`` tokens."""
    chosen = choose_conversations(rows, requests, isl_min, isl_max, seed)
    layouts = _Layouts()
    texts: dict[tuple[str, int], str] = {}
    heads: set[tuple[tuple[str, str], ...]] = set()
    made: list[ChatRequest] = []
    for number, row in enumerate(rows):
        if conversation_of(row) not in chosen:
            continue
        segments = layouts.lay_out(row)
        if not isl_min <= row.input_length <= isl_max:
            continue
        messages = _messages(segments, writer, texts)
        is_later_turn = any(messages[:end] in heads for end in range(1, len(messages)))
        heads.add(messages)
        made.append(
            ChatRequest(
                row=number,
                conversation=conversation_of(row),
                isl=row.input_length,
                osl=row.output_length,
                messages=messages,
                block_ids=row.hash_ids,
                is_later_turn=is_later_turn,
            )
        )
    return made


def _messages(
    segments: Iterable[Segment], writer: ChatText, texts: dict[tuple[str, int], str]
) -> tuple[tuple[str, str], ...]:
    messages: list[tuple[str, list[str]]] = []
    for segment in segments:
        tokens = segment.tokens
        if segment.opens:
            messages.append((segment.role, []))
            tokens = max(1, tokens - MESSAGE_TOKENS)
        key = (segment.seed, tokens)
        text = texts.get(key)
        if text is None:
            text = texts[key] = writer.text(segment.seed, tokens)
        messages[-1][1].append(text)
    if messages[-1][0] != "user":
        messages[-1] = ("user", messages[-1][1])
    return tuple((role, "".join(parts).lstrip()) for role, parts in messages)


def shared_tokens(requests: Iterable[ChatRequest]) -> int:
    """Return the prompt tokens in leading blocks that an earlier request had: what one endless cache reuses."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        lead = 0
        while lead < len(request.block_ids) and request.block_ids[lead] in seen:
            lead += 1
        total += min(lead * TRACE_BLOCK_TOKENS, request.isl)
        seen.update(request.block_ids)
    return total
