"""Whether a pool withstood an attack: a pure function of what was seen, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.attacks.attack import Attack, Outcome
from lab.attacks.bystanders import Window
from lab.attacks.pool import Look

LATENCY_RATIO_MAX = 3.0
"""p99 of others' short requests, beside idle."""

MEMORY_RATIO_MAX = 1.2
"""Memory of each process afterwards, beside before."""

PEAK_GROWTH_MB = 1024.0
"""What one attacker may make all processes hold meanwhile: a fifth of the smallest machine that a pool runs on."""

LOG_BYTES_MAX = 256 * 1024
"""What one attack may add to the log of a process: a year of an attack a minute is then still a disk's worth."""

SHORTS_MIN = 20
"""With fewer short requests nothing is known of their p99."""

BAD_LINES = re.compile(rb"Traceback \(most recent|this is a bug|was never (?:retrieved|awaited)")
CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(slots=True)
class Seen:
    """Everything known of one attack."""

    outcome: Outcome
    idle: Window
    during: Window
    before: Look
    after: Look
    deaths: list[str] = field(default_factory=list)
    peak_growth_mb: float = 0.0
    logs: Mapping[str, bytes] = field(default_factory=dict)
    connections: int = 0
    """Kept connections of the bystanders: some may be open at one look and not at the other."""

    @property
    def latency_ratio(self) -> float | None:
        """Return p99 during the attack over p99 when idle; ``None`` with too few requests."""
        if min(self.idle.shorts, self.during.shorts) < SHORTS_MIN or not self.idle.short_p99_ms:
            return None
        return self.during.short_p99_ms / self.idle.short_p99_ms

    @property
    def memory_ratio(self) -> float:
        """Return the worst process's memory afterwards over before."""
        return max((self.after.rss_mb.get(name, 0) / mb for name, mb in self.before.rss_mb.items()), default=0.0)


def unsettled(before: Look, after: Look, connections: int) -> list[str]:
    """Return in words what has not come back (yet): memory, descriptors, requests."""
    found = list(after.silent)
    for name, mb in before.rss_mb.items():
        now = after.rss_mb.get(name)
        if now is not None and now > MEMORY_RATIO_MAX * mb:
            found.append(f"{name} holds {now:.0f} MB, {mb:.0f} MB before")
    for name, count in before.descriptors.items():
        now_open = after.descriptors.get(name, 0)
        if now_open > count + connections:
            found.append(f"{name} has {now_open} descriptors open, {count} before")
    found += [f"{book} is {value:g}, not 0" for book, value in after.books.items() if value]
    return found


def judge(attack: Attack, seen: Seen, judge_latency: bool = True) -> list[str]:
    """Return in words what did not hold; the empty list is the only good answer."""
    found = list(seen.outcome.faults)
    if not attack.may_kill:
        found += seen.deaths
    during = seen.during
    if during.errors:
        found.append(f"{during.errors} of {during.requests} requests of others failed, the first: {during.samples[0]}")
    if during.wrong:
        found.append(f"{during.wrong} of {during.requests} answers to others were wrong: {during.samples[-1]}")
    if attack.judge_latency and judge_latency:
        ratio = seen.latency_ratio
        if during.shorts < SHORTS_MIN:
            found.append(f"only {during.shorts} short requests of others were answered")
        elif ratio is not None and ratio > LATENCY_RATIO_MAX:
            found.append(
                f"p99 of others' short requests was {during.short_p99_ms:.0f} ms, {ratio:.1f} times idle "
                f"({seen.idle.short_p99_ms:.0f} ms)"
            )
    if seen.peak_growth_mb > PEAK_GROWTH_MB:
        found.append(f"memory grew by {seen.peak_growth_mb:.0f} MB meanwhile, allowed are {PEAK_GROWTH_MB:.0f}")
    found += unsettled(seen.before, seen.after, seen.connections + attack.descriptors_more)
    expired = seen.after.lease_expiries - seen.before.lease_expiries
    if expired > attack.expiries_max:
        found.append(f"{expired:.0f} leases of living workers ran out")
    for name, text in seen.logs.items():
        if len(text) > LOG_BYTES_MAX:
            found.append(f"{name} wrote {len(text)} bytes to its log, allowed are {LOG_BYTES_MAX}")
        if CONTROL.search(text):
            found.append(f"{name} wrote control characters of others to its log")
        bad = BAD_LINES.search(text)
        if bad:
            at = text[bad.start() : bad.start() + 1500].decode(errors="replace")
            lines = [line for line in at.splitlines() if line.strip()]
            raised = next((line for line in lines[1:] if not line.startswith((" ", "Traceback"))), lines[0])
            found.append(f"{name} logged an exception that nobody expected: {raised[:200]}")
    return found
