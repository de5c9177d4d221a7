"""Findings about blocks: their size, tokens, parents and keys, and which are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from poolgrid.kernel.kv_events.pub import TIERS
from poolgrid.plugins.engine_check.core.evidence import Evidence
from poolgrid.plugins.engine_check.core.finding import Finding, Kind, fault, note, warning
from poolgrid.plugins.engine_check.core.said import RankStream, SaidMessage, SaidStored
from poolgrid.plugins.engine_check.core.views import ChainView, ExpectedPath, RouterView
from poolgrid.server.process.figures import counted


@dataclass(slots=True)
class BlockFigures:
    """How many blocks were expected of the probes, and what became of them."""

    expected: int = 0
    taken_in: int = 0
    """Blocks that the index of a router held at some time."""
    missing: list[tuple[ExpectedPath, int]] = field(default_factory=list)
    """Path and position of each block that it never held."""


def observed_block_size(streams: Mapping[int, RankStream]) -> int | None:
    """Return the block size of most stored events; ``None`` when there is none."""
    sizes = Counter(
        event.block_size
        for stream in streams.values()
        for _, _, event in stream.stored()
        if event.block_size and event.stands_for_prefixes
    )
    return sizes.most_common(1)[0][0] if sizes else None


def block_findings(
    evidence: Evidence,
    streams: Mapping[int, RankStream],
    paths: Sequence[ExpectedPath],
    views: Mapping[int, RouterView],
    figures: BlockFigures,
) -> Iterator[Finding]:
    """Yield what is wrong with blocks; ``figures`` is filled in, ``views`` are complete."""
    for stream in streams.values():
        yield from _sizes(stream, evidence)
        yield from _tokens(stream)
        yield from _groups(stream)
        yield from _media(stream)
        yield from _parents(stream, paths)
        yield from _keys(stream, paths)
        yield from _too_many(stream, paths)
    _count(paths, views, figures)


def _sizes(stream: RankStream, evidence: Evidence) -> Iterator[Finding]:
    told = evidence.told.block_size
    sizes = Counter(event.block_size for _, _, event in stream.stored() if event.stands_for_prefixes)
    if None in sizes:
        yield fault(Kind.BLOCK_SIZE, f"rank {stream.rank}", "stored events do not have the number of tokens of a block")
    others = sorted(size for size in sizes if size is not None and size != told)
    if told is not None and others:
        named = ", ".join(map(str, others))
        yield fault(
            Kind.BLOCK_SIZE,
            f"rank {stream.rank}",
            f"events have blocks of {named} tokens, the server or --kv-block-size of {told}",
            f"route with --kv-block-size {others[0]}: blocks are named by the tokens in them",
        )
    elif len(others) > 1:
        yield fault(
            Kind.BLOCK_SIZE,
            f"rank {stream.rank}",
            f"events have blocks of {', '.join(map(str, others))} tokens: several caches share a publisher",
        )


def _tokens(stream: RankStream) -> Iterator[Finding]:
    without = [said.sequence for _, said, event in stream.stored() if event.tokens is None]
    if without:
        yield fault(
            Kind.TOKENS_MISSING,
            f"rank {stream.rank}, sequence {without[0]}",
            f"{counted(len(without), 'stored event')} without a list of token ids: blocks cannot be named",
        )
    odd = [
        (said.sequence, len(event.tokens or ()), event)
        for _, said, event in stream.stored()
        if event.tokens is not None
        and event.block_size
        and event.stands_for_prefixes
        and len(event.tokens) != event.block_size * len(event.hashes)
    ]
    if odd:
        sequence, tokens, event = odd[0]
        size = event.block_size or 1
        partial = tokens < size * len(event.hashes) and -(-tokens // size) == len(event.hashes)
        words = f"{counted(len(event.hashes), 'block')} of {size} with {tokens} tokens"
        if partial:
            yield note(
                Kind.TOKENS_AND_HASHES, f"rank {stream.rank}, sequence {sequence}", f"{words}: the last is partial"
            )
        else:
            yield fault(
                Kind.TOKENS_AND_HASHES,
                f"rank {stream.rank}, sequence {sequence}",
                f"{words}: hashes and tokens are not of the same blocks",
            )


def _groups(stream: RankStream) -> Iterator[Finding]:
    groups = sorted({(event.group or 0, event.attention) for _, _, event in stream.stored()})
    if len(groups) < 2 and all(event.stands_for_prefixes for _, _, event in stream.stored()):
        return
    full = [group for group, kind in groups if not kind or "full" in kind.lower() or "mla" in kind.lower()]
    named = ", ".join(f"{group} ({kind or 'of no kind'})" for group, kind in groups)
    place = f"rank {stream.rank}"
    if not full:
        yield fault(
            Kind.WINDOWS,
            place,
            f"the groups of layers are {named}, none with full attention: blocks of a window stand for no prefix",
            "route by the router's own predictions (policy approximate)",
        )
    elif any(not kind for _, kind in groups):
        yield fault(
            Kind.GROUPS_UNNAMED,
            place,
            f"the groups of layers are {named}: which has full attention is not reported, so a block that leaves "
            "one group seems to leave all",
            "use a version of the engine whose events have kv_cache_spec_kind",
        )
    elif len(groups) > 1:
        yield warning(
            Kind.WINDOWS,
            place,
            f"the groups of layers are {named}: routers follow group {full[0]}; where the others have evicted, the "
            "engine reuses less than the index predicts",
        )


def _media(stream: RankStream) -> Iterator[Finding]:
    media = sorted(
        {event.medium for _, _, event in stream.stored() if event.medium and event.medium.upper() not in TIERS}
    )
    if media:
        yield note(
            Kind.OTHER_MEDIUM,
            f"rank {stream.rank}",
            f"blocks on {', '.join(media)} are no worker's own, and are left out",
        )


def _parents(stream: RankStream, paths: Sequence[ExpectedPath]) -> Iterator[Finding]:
    """Only blocks of probes count: what others stored before the check began may have unknown parents."""
    chain = ChainView(())
    places: dict[int, list[tuple[int, ...]]] = {}
    for path in paths:
        for at, token in enumerate(path.tokens):
            places.setdefault(token, []).append(path.tokens[at : at + 2])
    for _, said in stream.said():
        for event in said.events:
            known = not isinstance(event, SaidStored) or event.parent is None or chain.knows(event.parent)
            chain.follow(event)  # the next one of the same message may hang on it
            if known or not isinstance(event, SaidStored):
                continue
            if event.tokens and event.tokens[:2] in places.get(event.tokens[0], ()):
                yield fault(
                    Kind.PARENT_UNKNOWN,
                    f"rank {stream.rank}, sequence {said.sequence}",
                    f"blocks of a probe hang on a block {event.parent:016x} that is not stored: the event that stored "
                    "it is missing, or comes later",
                )
                return


def _keys(stream: RankStream, paths: Sequence[ExpectedPath]) -> Iterator[Finding]:
    """Compare what the blocks of probes are stored under with what the probes were sent with."""
    salts = {path.probe.salt for path in paths if path.probe.salt}
    chain = ChainView(salts)
    stored_salted: set[int] = set()
    said_already: set[Kind] = set()
    for number, said in stream.said():
        for event in said.events:
            if not isinstance(event, SaidStored) or not event.stands_for_prefixes:
                continue
            path = _path_at(paths, number, [block.token_name for block in chain.store(event)])
            if path is None:
                continue
            if path.probe.salt:
                stored_salted.add(path.number)
            for finding in _keys_of(stream.rank, said, event, path):
                if finding.kind not in said_already:
                    said_already.add(finding.kind)
                    yield finding
        # Removed and cleared blocks matter to parents only, and those of probes were stored a moment ago.
    first_salted = next((path for path in paths if path.probe.salt), None)
    if first_salted is not None and first_salted.number not in stored_salted:
        cached = first_salted.exchange.cached_tokens
        if cached:
            yield fault(
                Kind.SALT_IGNORED,
                f"probe {first_salted.probe.name!r}",
                f"a prompt with a cache_salt that was never used took {cached} tokens from the cache of the prompt "
                "without one: the engine does not separate salts",
                "do not isolate tenants with this engine: they share its cache",
            )


def _path_at(paths: Sequence[ExpectedPath], number: int, token_names: Sequence[int]) -> ExpectedPath | None:
    """Return the last probe sent before a message whose path begins with these blocks' ends."""
    if not token_names:
        return None
    found = None
    for path in paths:
        if path.exchange.heard_before <= number and token_names[0] in path.token_names:
            found = path
    return found


def _keys_of(rank: int, said: SaidMessage, event: SaidStored, path: ExpectedPath) -> Iterator[Finding]:
    place = f"rank {rank}, sequence {said.sequence}, probe {path.probe.name!r}"
    salt, lora = path.probe.salt, path.probe.lora
    first = event.keys[0] if event.keys else ()
    if lora and event.lora_name != lora:
        number = "nothing" if event.lora_id is None else f"the number {event.lora_id}"
        yield fault(
            Kind.LORA_UNNAMED,
            place,
            f"a block of the adapter {lora!r} has {number} where its name belongs: a number means another adapter "
            "elsewhere",
            "use a version of the engine whose events have lora_name",
        )
    if salt and event.parent is None and not event.salt and salt not in first:
        yield fault(
            Kind.SALT_MISSING,
            place,
            "the first block of a prompt with a cache_salt does not have the salt: it would count for requests "
            "without one, and for those of other tenants",
            "use a version of the engine whose events have extra_keys, and do not isolate tenants until then",
        )
    if salt and lora and salt in first and lora in first and first.index(salt) < first.index(lora):
        yield fault(
            Kind.KEYS_ORDER,
            place,
            f"the keys of a block are {list(first)!r}; expected are the adapter, then media, then the salt",
        )
    strange = [key for keys in event.keys for key in keys if key is not None and key not in (salt, lora)]
    if strange:
        yield fault(
            Kind.KEYS_UNKNOWN,
            place,
            f"a block of plain text is stored under {strange[0]!r}, which no request has: requests cannot be matched "
            "with it",
        )


def _too_many(stream: RankStream, paths: Sequence[ExpectedPath]) -> Iterator[Finding]:
    """Look for blocks with the last sampled token in them, which has no KV yet.

    Unless the engine reuses one: SGLang has begun its next step, with that token, when it sees that a request is over.
    """
    chain = ChainView(())
    for _, said in stream.said():
        chain.take(said)
    stored = {block.token_name for block in chain.ever}
    reused = {name for path in paths for name in path.token_names[: (path.exchange.cached_tokens or 0) // path.size]}
    if any(path.beyond in reused for path in paths):
        return
    for path in paths:
        if path.beyond in stored:
            yield warning(
                Kind.BLOCKS_TOO_MANY,
                f"rank {stream.rank}, probe {path.probe.name!r}",
                "a block is stored that ends with the last sampled token, whose KV was not computed",
            )
            return


def _count(paths: Sequence[ExpectedPath], views: Mapping[int, RouterView], figures: BlockFigures) -> None:
    seen: set[tuple[int | None, int]] = set()
    for path in paths:
        rank = path.probe.rank
        ever = (
            set().union(*(view.ever for view in views.values()))
            if rank is None or rank not in views
            else views[rank].ever
        )
        for position, name in enumerate(path.names):
            if (rank, name) in seen:
                continue
            seen.add((rank, name))
            figures.expected += 1
            if name in ever:
                figures.taken_in += 1
            else:
                figures.missing.append((path, position))
