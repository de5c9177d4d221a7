"""``python -m lab.prose [--write] [DOCUMENT ...]``: print what breaks our style, or lower the budget to it."""

from __future__ import annotations

import sys
from collections import Counter

from lab.prose.counts import counts, every_finding, write_budget

words = sys.argv[1:]
found = every_finding()
if "--write" in words:
    write_budget(found)
chosen = {word for word in words if not word.startswith("-")}
for each in found:
    if not chosen or each.document in chosen:
        print(f"{each.document}:{each.line}: {each.rule}: {each.text}")
by_rule = ", ".join(f"{rule} {number}" for rule, number in Counter(each.rule for each in found).most_common())
print(f"{len(found)} findings in {len(counts(found))} texts: {by_rule}")
