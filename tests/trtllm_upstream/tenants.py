"""Blocks made by upstream's own event manager, with salts, adapters and images, read by our translator.

The manager is real (``_event_manager.py``); the radix tree that feeds it is a model of ours, because upstream's needs
the compiled library in newer versions. Every claim is compared, block by block, with the tenant that the block has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from itertools import product, takewhile
from types import SimpleNamespace
from typing import Any

from poolgrid.kernel.kv_events.trtllm import _name, parse_event
from poolgrid.kernel.wire.hashing import BASE_SEED, block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.server.workers.engines.root_seeds import RootSeeds
from tests.trtllm_upstream.files import COMMON, EVENTS, HASH, UpstreamFiles

BLOCK = 4
BLOCKS_MAX = 400
"""Blocks that the modelled cache holds."""
SALTS = ("", "tenant-a", "tenant-b")
ADAPTERS = (("", None), ("legal", 7))
ALGORITHMS = ("v1_block_key", "v2_sha256", "v2_sha256_64")
KINDS = {
    "KVCacheCreatedData": "created",
    "KVCacheStoredData": "stored",
    "KVCacheRemovedData": "removed",
    "KVCacheUpdatedData": "updated",
}


Children = dict[tuple["int | bytes", ...], "RadixBlock"]


@dataclass(frozen=True)
class TreePage:
    """What the event manager reads of a page: it is on the device, and full."""

    cache_level: int = 0
    priority: int = 35
    num_tokens_in_block: int = BLOCK


@dataclass(eq=False)
class TreeBlock:
    """What the event manager reads of a block: its pages by group of layers, as references or by a method."""

    key: bytes
    tokens: list[int | bytes]
    prev: Any
    ordinal: int
    storage: list[Any]

    def get_page(self, group: int) -> TreePage | None:
        reference = self.storage[group]
        return None if reference is None else reference()


@dataclass(eq=False)
class RadixBlock(TreeBlock):
    """A block, and what it is on the wire."""

    salt: str
    name: int | None
    """Its sequence hash on the wire; ``None`` = it depends on an image."""
    siblings: Children
    children: Children = field(default_factory=dict)


@dataclass
class TenantsReport:
    """What a run found."""

    events: int = 0
    blocks: int = 0
    wrong: int = 0
    """Blocks claimed under another name than their own."""
    claimed: int = 0
    claimable: int = 0
    """Text blocks that were resident at the end of each program, and how many of them were claimed."""

    def __str__(self) -> str:
        return (
            f"{self.events:,} events, {self.blocks:,} stored blocks: {self.wrong} attributed wrongly; "
            f"{self.claimed:,} of {self.claimable:,} resident text blocks known at the ends"
        )


def as_json(event: Any) -> dict[str, Any]:
    """Return an event in the JSON form of the serializer, which needs the compiled library."""
    data = event.data
    body: dict[str, Any] = {"type": KINDS[type(data).__name__]}
    for each in fields(data):
        value = getattr(data, each.name)
        if each.name == "blocks":
            value = [_block_json(block) for block in value]
        elif hasattr(value, "new_value"):
            value = {"type": "event_diff", "new_value": value.new_value, "old_value": value.old_value}
        body[each.name] = value
    made = {each.name: getattr(event, each.name) for each in fields(event) if each.name != "data"}
    if made["attention_dp_rank"] is None:
        del made["attention_dp_rank"]
    return {**made, "data": body}


def _block_json(block: Any) -> dict[str, Any]:
    made = {each.name: getattr(block, each.name) for each in fields(block)}
    tokens = [{"type": "unique_token", "token_id": each.token_id, "token_extra_id": 0} for each in block.tokens]
    return {**made, "type": "stored_block", "tokens": tokens}


class Engine:
    """An event manager of upstream over a modelled tree, and our reading of it."""

    def __init__(self, files: UpstreamFiles, algorithm: str, names_salts: bool, salts_are_known: bool) -> None:
        self._module = files.load(EVENTS, HASH, COMMON)
        self._hashes = files.load(HASH)
        self.manager = self._module.KVCacheEventManager(1 << 20, hash_algo=algorithm, window_size=4096)
        self.manager.add_created_event([BLOCKS_MAX, 0], [0])
        self._names_salts = names_salts
        self._salts_are_known = salts_are_known
        self._roots: dict[tuple[str, str], Any] = {}
        self.blocks: dict[int, RadixBlock] = {}
        self.seeds = RootSeeds(BLOCK)
        self.translator = EventTranslator(BLOCK, root_seed=self.seeds)
        self.read(TenantsReport())

    def insert(self, tokens: list[int | bytes], salt: str, adapter: tuple[str, int | None]) -> None:
        """Store a prompt's whole blocks as a finished request does; the worker notes the request before."""
        text = list(takewhile(lambda each: isinstance(each, int), tokens))
        self.seeds.note(pack_tokens(text), adapter[0], adapter[1], salt)  # type: ignore[arg-type]
        node = self._root(salt, adapter)
        seed = hash_seed(adapter[0], salt) if salt or adapter[0] else BASE_SEED
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            part = tuple(tokens[at : at + BLOCK])
            child = node.children.get(part)
            if child is None:
                page = TreePage()
                name = None
                if all(isinstance(each, int) for each in part) and (not at or node.name is not None):
                    own = block_hashes(pack_tokens(part), BLOCK, seed)  # type: ignore[arg-type]
                    name = sequence_hashes(own, node.name if at else None)[0]
                key = sha256(node.key + repr(part).encode()).digest()
                child = RadixBlock(
                    key, list(part), node.block, at // BLOCK, [lambda page=page: page], salt, name, node.children
                )
                node.children[part] = child
                self.blocks[_name(self.manager._hash_from_radix_block(child))] = child
                self.manager.add_stored_block_event_from_block(child)
            node = SimpleNamespace(children=child.children, key=child.key, block=child, name=child.name)

    def _root(self, salt: str, adapter: tuple[str, int | None]) -> Any:
        made = self._roots.get((salt, adapter[0]))
        if made is None:
            number = None
            if salt:
                number = self._hashes.get_cache_salt_id(salt) if self._salts_are_known else hash(salt) & (2**64 - 1)
            scope = SimpleNamespace(lora_id=adapter[1], salt=number)
            root = SimpleNamespace(reuse_scope=scope, ordinal=-1)
            key = sha256(repr((number, adapter[1])).encode()).digest()
            made = SimpleNamespace(children={}, key=key, block=root, name=None)
            self._roots[salt, adapter[0]] = made
        return made

    def evict(self, randomness: random.Random) -> None:
        """Remove leaves until the cache has room."""
        while len(self.blocks) > BLOCKS_MAX:
            leaves = [name for name, block in self.blocks.items() if not block.children]
            for name in randomness.sample(leaves, min(len(leaves), 40)):
                block = self.blocks.pop(name)
                del block.siblings[tuple(block.tokens)]
                self.manager.add_removed_event(block.key)

    def read(self, report: TenantsReport) -> None:
        """Read what there is, and compare each claim with the truth."""
        self.manager.flush_iteration_events()
        for made in self.manager.get_latest_events(0):
            event = made
            if type(event.data).__name__ == "KVCacheStoredData" and self._names_salts:
                blocks = [replace(block, cache_salt=self._salt_of(block)) for block in event.data.blocks]
                event = replace(event, data=replace(event.data, blocks=blocks))
            read = parse_event(as_json(event))
            self.translator.translate([read])
            report.events += 1
            for block in getattr(read, "blocks", ()):
                report.blocks += 1
                claim, truth = self.translator._blocks.get(block.block_hash), self.blocks.get(block.block_hash)
                if claim is not None and truth is not None and claim.sequence_hash != truth.name:
                    report.wrong += 1

    def _salt_of(self, block: Any) -> str | None:
        known = self.blocks.get(_name(block.block_hash))
        return (known.salt or None) if known else None


def run(files: UpstreamFiles, events: int, seed: int = 0) -> TenantsReport:
    """Run programs of every algorithm, with and without named salts, until so many events were read."""
    report = TenantsReport()
    programs = list(product(ALGORITHMS, (False, True), (True, False)))
    for number, (algorithm, names_salts, salts_are_known) in enumerate(programs, 1):
        randomness = random.Random(seed * 1000 + number)
        engine = Engine(files, algorithm, names_salts, salts_are_known)
        while report.events < events * number // len(programs):
            for _ in range(randomness.randint(1, 4)):
                engine.insert(_prompt(randomness), randomness.choice(SALTS), randomness.choice(ADAPTERS))
            if randomness.random() < 0.9:  # the reader is late now and then
                engine.read(report)
            engine.evict(randomness)
        engine.read(report)
        text = [name for name, block in engine.blocks.items() if block.name is not None]
        report.claimable += len(text)
        report.claimed += sum(name in engine.translator._blocks for name in text)
        report.wrong += sum(
            engine.blocks[name].name != block.sequence_hash
            for name, block in engine.translator._blocks.items()
            if name in engine.blocks
        )
    return report


def _prompt(randomness: random.Random) -> list[int | bytes]:
    """Return a prompt of few different beginnings; some have an image, a digest and numbers beyond the vocabulary."""
    head = [1000 * randomness.randrange(6) + at for at in range(2 * BLOCK)]
    tail = [randomness.randrange(32_000) for _ in range(randomness.randrange(6 * BLOCK))]
    tokens: list[int | bytes] = [*head[: randomness.choice((0, BLOCK, 2 * BLOCK))], *tail]
    if randomness.random() < 0.2:
        at = randomness.randrange(len(tokens) + 1)
        digest = sha256(bytes([randomness.randrange(4)])).digest()
        tokens[at:at] = [digest, *range(32_001, 32_001 + randomness.randrange(9))]
    return tokens
