"""Chains that are held until their salt is known: in the end the same is told as if it had been known at first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from poolgrid.kernel.kv_events import unclaimed_chains
from poolgrid.kernel.kv_events.pub import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from poolgrid.kernel.kv_events.translation import EngineTranslator
from poolgrid.kernel.kv_events.unclaimed_chains import UnclaimedChains
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks
from poolgrid.server.workers.engines.root_seeds import RootSeeds, root_digest, salt_ids

BLOCK = 2
SALTS = ("", "one", "two")


class Engine:
    """Stores and removes blocks at random, and forgets the last ones of a chain first."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: dict[tuple[str, tuple[int, ...]], int] = {}
        self.cached: dict[tuple[str, tuple[int, ...]], int] = {}

    def name_of(self, salt: str, path: tuple[int, ...]) -> int:
        if len(path) == BLOCK:
            return root_digest(pack_tokens(path), salt_ids(salt)[0])
        return self.names.setdefault((salt, path), self.random.getrandbits(64))

    def step(self) -> list[EngineEvent]:
        kind = self.random.random()
        if kind < 0.01:
            self.cached.clear()
            return [EngineCleared()]
        if kind < 0.4:
            ends = [key for key in self.cached if not self._has_children(key)]
            gone = self.random.sample(ends, min(len(ends), 2))
            return [EngineRemoved([self.cached.pop(each) for each in gone], Tier.DEVICE)] if gone else []
        salt = self.random.choice(SALTS)
        whole = tuple(self.random.choices(range(2), k=BLOCK * self.random.randint(1, 4)))
        paths = [whole[:end] for end in range(BLOCK, len(whole) + 1, BLOCK)]
        new = [each for each in paths if (salt, each) not in self.cached]
        for each in new:
            self.cached[salt, each] = self.name_of(salt, each)
        if not new:
            return []
        above = new[0][:-BLOCK]
        parent = self.name_of(salt, above) if above else None
        hashes = [self.name_of(salt, each) for each in new]
        return [EngineStored(hashes, parent, pack_tokens(whole[len(above) :]), BLOCK, None, Tier.DEVICE)]

    def _has_children(self, key: tuple[str, tuple[int, ...]]) -> bool:
        salt, path = key
        return any(s == salt and len(p) > len(path) and p[: len(path)] == path for s, p in self.cached)


class Follower:
    """What readers know, with some salts known from the beginning."""

    def __init__(self, salts: Sequence[str]) -> None:
        self.roots = RootSeeds(BLOCK, digest_is_known=True)
        for each in salts:
            self.roots.note_salt(each)
        self.unclaimed = UnclaimedChains(self.roots.of_stream)
        self.translator = EngineTranslator(BLOCK, 10_000, self.roots.of_stream)
        self.told = ReportedBlocks()

    def take(self, events: list[EngineEvent]) -> None:
        self._tell(self.translator.translate(self.unclaimed.pass_on(events)))

    def report(self, salt: str) -> None:
        if self.roots.note_salt(salt):
            self._tell(self.translator.translate(self.unclaimed.claimed_by(self.roots.of_salt(salt))))

    def _tell(self, events: list[AnyEvent]) -> None:
        self.told.apply(events)

    def tree(self) -> set[tuple[int | None, int]]:
        """Return each block that readers know, behind its parent."""
        links: set[tuple[int | None, int]] = set()
        for event in self.told.restate():
            assert isinstance(event, BlocksStored)
            names = list(unpack_hashes(event.sequence_hashes))
            links |= set(zip([event.parent, *names], names, strict=False))
        return links

    def blocks(self) -> int:
        return self.told.count_on(Tier.DEVICE)


@pytest.mark.parametrize("seed", range(40))
def test_a_salt_that_is_reported_late_ends_in_the_same_claims(seed: int) -> None:
    engine, at_first, late = Engine(seed), Follower(SALTS), Follower(())
    reported = {engine.random.randrange(300): salt for salt in SALTS[1:]}
    for at in range(300):
        events = engine.step()
        at_first.take(events)
        late.take(events)
        if at in reported:
            late.report(reported[at])
        assert len(late.translator) + len(late.unclaimed) == len(engine.cached) == at_first.blocks()
    assert late.tree() == at_first.tree()
    assert not late.unclaimed.chains


def test_of_too_many_blocks_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclaimed_chains, "HELD_BLOCKS_MAX", 3)
    follower = Follower(())
    for first in range(4):
        tokens = pack_tokens((first, first))
        follower.take([EngineStored([root_digest(tokens, salt_ids("one")[0])], None, tokens, BLOCK, None, Tier.DEVICE)])
    assert len(follower.unclaimed) == follower.unclaimed.chains == 3
    follower.report("two")
    assert (follower.blocks(), len(follower.unclaimed)) == (0, 3)
    follower.report("one")
    assert (follower.blocks(), len(follower.unclaimed)) == (3, 0)
