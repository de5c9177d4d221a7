"""Groups of layers in events of upstream's own manager: what our index promises against what a naive tree can resume.

The manager is real (``_event_manager.py``), the tree that feeds it is the naive one of ``tests.trtllm``.
"""

from __future__ import annotations

import random
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from poolgrid.kernel.kv_events.trtllm import parse_event
from tests.router.test_kv_groups import BLOCK, BLOCKS, PROMPTS, names_of
from tests.trtllm.test_layer_groups import LONGEST, Engine, Reader
from tests.trtllm_upstream.files import COMMON, EVENTS, HASH, UpstreamFiles
from tests.trtllm_upstream.tenants import ALGORITHMS, TreeBlock, TreePage, as_json

MODELS = [(LONGEST, 9), (6, LONGEST, 14), (LONGEST, LONGEST)]


class ManagedEngine(Engine):
    """A naive engine whose events upstream's manager makes."""

    def __init__(self, files: UpstreamFiles, windows: tuple[int, ...], algorithm: str) -> None:
        module = files.load(EVENTS, HASH, COMMON)
        sizes = dict(enumerate(windows))
        self._manager = module.KVCacheEventManager(
            1 << 20, hash_algo=algorithm, window_size=LONGEST, window_size_by_layer_group=sizes
        )
        self._blocks: dict[int, Any] = {}
        super().__init__(windows, names_groups=True)

    def begin(self) -> None:
        self.pages = [set() for _ in self.windows]
        self._manager.add_created_event([100, 0], list(range(len(self.windows))))

    def store(self, prompt: list[int], end: int, kept: set[int]) -> None:
        before = [set(pages) for pages in self.pages]
        super().store(prompt, end, kept)
        node: Any = SimpleNamespace(reuse_scope=None, ordinal=-1, key=b"root")
        for at, name in enumerate(names_of(prompt)[:end]):
            block = self._blocks.get(name)
            if block is None:
                key = sha256(node.key + bytes(str(name), "ascii")).digest()
                block = TreeBlock(key, [*prompt[at * BLOCK : (at + 1) * BLOCK]], node, at, [])
                self._blocks[name] = block
            page = TreePage()
            block.storage = [(lambda page=page: page) if name in pages else None for pages in self.pages]
            fresh = [group for group, pages in enumerate(self.pages) if name in pages and name not in before[group]]
            if self.full in fresh:
                self._manager.add_stored_block_event_from_block(block)
            else:
                for group in fresh:
                    self._manager.add_stored_life_cycle_event_from_block(block, group)
            node = block

    def emit(self, group: int, data: dict[str, Any]) -> None:
        """Leave the events to the manager."""

    def drop(self, group: int, names: list[int]) -> None:
        held = [name for name in names if name in self.pages[group]]
        self.pages[group].difference_update(held)
        for name in held:
            self._manager.add_removed_life_cycle_event(self._blocks[name].key, group)

    def flush(self) -> list[dict[str, Any]]:
        self._manager.flush_iteration_events()
        return [as_json(event) for event in self._manager.get_latest_events(0)]


def run(files: UpstreamFiles, programs: int, seed: int = 0) -> tuple[int, int]:
    """Run random programs; return how many promises were compared, and how many were not what can be resumed."""
    compared = wrong = 0
    for number in range(programs):
        randomness = random.Random(seed * 10_007 + number)
        engine = ManagedEngine(files, randomness.choice(MODELS), randomness.choice(ALGORITHMS))
        reader = Reader(engine)
        for _ in range(25):
            prompt = randomness.choice(PROMPTS)
            if randomness.random() < 0.6:
                kept = {at for at in range(BLOCKS) if randomness.random() < 0.5}
                engine.store(prompt, randomness.randint(1, BLOCKS), kept)
            else:
                engine.evict(randomness.randrange(len(engine.windows)), prompt, randomness.randrange(BLOCKS))
            if randomness.random() < 0.3:
                continue  # the reader is late now and then
            translation = engine.translator.translate(map(parse_event, engine.flush()))
            reader.take(reader.engine, [*translation.events])
            for each in PROMPTS:
                compared += 1
                wrong += reader.promises(each) != engine.resumes_at(each)
    return compared, wrong
