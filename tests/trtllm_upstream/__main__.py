"""Compare poolgrid's facts of TensorRT-LLM with upstream's own Python files in a folder.

    python -m tests.trtllm_upstream DIR [--events 1000000] [--faults 1000]

DIR is a checkout, an installation, or single files at their places. One line per fact: held, contradicted (with both
values), or absent. Then blocks made by upstream's event manager are read (``--events``), and its publisher is followed
through gaps, replays and restarts (``--faults``). The exit status is 1 where a contradiction is handled nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from tests.trtllm_upstream import groups, stream, tenants
from tests.trtllm_upstream.conformance import CONTRADICTED, check
from tests.trtllm_upstream.files import EVENTS, HASH, PUBLISHER, UpstreamFiles


def main() -> int:
    """Print the facts; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path, help="Folder with upstream's files.")
    parser.add_argument("--events", type=int, default=20_000, help="Events of its event manager to read.")
    parser.add_argument("--faults", type=int, default=50, help="Faults of its publisher to go through.")
    given = parser.parse_args()
    if not given.dir.is_dir():
        parser.error(f"DIR is {given.dir}: not a directory")
    files = UpstreamFiles(given.dir)
    print(f"TensorRT-LLM {files.version} in {given.dir}")
    found: Counter[str] = Counter()
    failed = False
    for fact in check(files):
        print(fact)
        found[fact.status] += 1
        failed = failed or (fact.status == CONTRADICTED and not fact.handled)
    print(", ".join(f"{count} {status}" for status, count in found.items()))
    if files.text(EVENTS) and files.text(HASH) and given.events:
        report = tenants.run(files, given.events)
        print(f"tenants: {report}")
        failed = failed or report.wrong > 0
        compared, wrong = groups.run(files, max(1, given.events // 100))
        print(f"groups: {wrong} of {compared:,} promises are not what every group of layers can resume")
        failed = failed or wrong > 0
    if files.text(PUBLISHER) and given.faults:
        with tempfile.TemporaryDirectory() as directory:
            survived = asyncio.run(stream.follow(files, given.faults, Path(directory)))
        print(f"stream: index equal to the engine's blocks after each of {dict(survived or {})}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
