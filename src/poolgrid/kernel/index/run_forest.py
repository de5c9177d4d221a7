"""Runs of blocks as a forest: which run continues which, which is older, and which are leaves.

Rules
    1. Runs whose parent is gone, or was never there, are linked to each other as those of a parent are. ``RunMap`` has
       the first of them, and gives them to their parent once that comes.
    2. A leaf is a run without children. Leaves have an order of their own, by when they became leaves: at its old end
       is what to evict first.
    3. All links lie in the runs themselves. Adding, splitting and removing a run takes the same time in any forest,
       also where a hundred thousand runs continue the same one.
    4. A run names only runs that are in the forest: one that is taken out loses its links, and one that is no leaf has
       none to leaves. A prefix that stays for days would else keep alive whatever was its neighbour once.
    5. A discarded forest cuts all links, as the garbage collector does not know runs. A caller that must stay
       responsive takes the newest out, one after the other, before (``discard_newest``).
"""

from __future__ import annotations

from array import array
from typing import Any, Final

from poolgrid.kernel.index.intrusive_lru import IntrusiveLru, LruEntry

RUN_BYTES: Final = 152
"""A run with its list, without what is in the list: measured."""


class Run(LruEntry):
    """Consecutive blocks of one path with the same holders."""

    parent: int | None
    """The block before the first."""
    blocks: array[int]
    """Their hashes."""
    mask: int
    child: Any = None
    """One of the runs that continue the last block; the others follow to its right."""
    left: Any = None
    right: Any = None
    older_leaf: Any = None
    newer_leaf: Any = None
    number: int = 0
    """By which the index notes what is in it."""
    used: bool = False
    """True when it grew or was stored again since eviction looked at it last."""


class RunForest:
    """All runs of an index."""

    __slots__ = ("_leaves_end", "ages")

    def __init__(self) -> None:
        self.ages: IntrusiveLru[Run] = IntrusiveLru()
        """Every run, by age."""
        end = Run(None, array("Q"), 0)
        end.older_leaf = end.newer_leaf = end
        self._leaves_end = end

    def __del__(self) -> None:
        while self.discard_newest() is not None:
            pass
        self.ages.close()
        self._no_leaf(self._leaves_end)

    def add(self, run: Run, above: Run | None) -> None:
        """Add a new run; it continues the last block of ``above``, or nothing."""
        self.ages.append(run)
        if above is not None:
            first = above.child
            if first is None:
                self._no_leaf(above)
            else:
                run.right = first
                first.left = run
            above.child = run
        self.append_leaf(run)

    def give_children(self, run: Run, child: Run) -> None:
        """Put runs below one that has none: the first, which the others follow to its right."""
        self._no_leaf(run)
        run.child = child

    def take_children(self, run: Run) -> None:
        """Cut all that continues a run off; it is the newest leaf."""
        run.child = None
        self.append_leaf(run)

    def cut_tail(self, run: Run, at: int) -> Run:
        """Cut a run before position ``at``: the front part stays ``run``, the tail is returned."""
        blocks = run.blocks
        tail = Run(blocks[at - 1], blocks[at:], run.mask)
        del blocks[at:]
        tail.child = run.child
        tail.used = run.used
        run.child = tail
        self.ages.insert_behind(run, tail)
        if tail.child is None:
            older, newer = run.older_leaf, run.newer_leaf
            tail.older_leaf, tail.newer_leaf = older, newer
            older.newer_leaf = newer.older_leaf = tail
            run.older_leaf = run.newer_leaf = None
        return tail

    def cut_front(self, run: Run, at: int, above: Run | None) -> Run:
        """Cut a run before position ``at``: the tail stays ``run``, the front part is returned.

        ``above`` is the run that it continues, where there is one.
        """
        blocks = run.blocks
        front = Run(run.parent, blocks[:at], run.mask)
        del blocks[:at]
        run.parent = front.blocks[-1]
        front.used = run.used
        left, right = run.left, run.right
        front.left, front.right = left, right
        if left is not None:
            left.right = front
        elif above is not None:
            above.child = front
        if right is not None:
            right.left = front
        run.left = run.right = None
        front.child = run
        self.ages.insert_before(run, front)
        return front

    def remove(self, run: Run, above: Run | None, evicted: bool = False) -> None:
        """Take a run out; ``above`` is the run that it continues, where that is still there.

        If that becomes a leaf it is the newest one, or the oldest when its last child was ``evicted``: the rest of a
        path that was not used for longest goes next.
        """
        self.ages.remove(run)
        if run.child is None:
            self._no_leaf(run)
        left, right = run.left, run.right
        if right is not None:
            right.left = left
        if left is not None:
            left.right = right
        elif above is not None and above.child is run:
            above.child = right
            if right is None:
                self.append_leaf(above)
                if evicted:
                    self._make_oldest_leaf(above)
        run.child = run.left = run.right = None

    @property
    def oldest_leaf(self) -> Run | None:
        """Return the leaf to evict first, or ``None`` in an empty forest."""
        run: Run = self._leaves_end.newer_leaf
        return None if run is self._leaves_end else run

    def postpone(self, leaf: Run) -> None:
        self._no_leaf(leaf)
        self.append_leaf(leaf)

    def discard_newest(self) -> Run | None:
        """Take the newest run out of a discarded forest, and cut its links."""
        run = self.ages.discard_newest()
        if run is not None:
            if run.child is None:
                self._no_leaf(run)
            # A parent, which goes later, still names its child: that must not keep all that it names alive.
            run.child = run.left = run.right = None
        return run

    def append_leaf(self, run: Run) -> None:
        """Add a run without children to the leaves, as the newest."""
        end = self._leaves_end
        before = end.older_leaf
        run.older_leaf = before
        run.newer_leaf = end
        before.newer_leaf = end.older_leaf = run

    def _make_oldest_leaf(self, run: Run) -> None:
        self._no_leaf(run)
        end = self._leaves_end
        behind = end.newer_leaf
        run.older_leaf = end
        run.newer_leaf = behind
        behind.older_leaf = end.newer_leaf = run

    @staticmethod
    def _no_leaf(run: Run) -> None:
        older, newer = run.older_leaf, run.newer_leaf
        older.newer_leaf = newer
        newer.older_leaf = older
        run.older_leaf = run.newer_leaf = None
