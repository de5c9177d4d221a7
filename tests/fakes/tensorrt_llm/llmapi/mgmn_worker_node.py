# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""``python3 -m tensorrt_llm.llmapi.mgmn_worker_node``: every other rank of MPI, which takes part until rank 0 ends."""

from __future__ import annotations

from .._fake.world import STOP, open_world


def main() -> None:
    """Take part in the collective calls."""
    world = open_world(is_leader=False)
    while world.step(b"") != STOP:
        pass


if __name__ == "__main__":
    main()
