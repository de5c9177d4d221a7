"""How many connections to workers the open files of this process allow.

Whoever can make a worker's card known makes every router of the pool open a connection for it. When those have taken
the last descriptor, no client is let in any more. So links have a share of their own, and a worker beyond it is
unreachable and said to be.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

LINKS_MAX = 8192
"""Worker processes of a large fleet of pools, twice over; each link is a socket and its monitor."""

FILES_PER_LINK = 4
"""A link's connection, and the descriptors by which its socket and both ends of its monitor are woken."""


def links_that_fit(wanted: int = LINKS_MAX) -> int:
    """Return how many links half of the limit of open files allows; raises that limit for them where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = max(soft, 2 * FILES_PER_LINK * wanted)
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        log.info("raised the limit of open files from %d to %d for %d connections to workers", soft, allowed, wanted)
    fit = max(1, min(wanted, allowed // 2 // FILES_PER_LINK))
    if fit < wanted:
        log.info("%d connections to workers fit into half of the limit of %d open files (ulimit -n)", fit, allowed)
    return fit
