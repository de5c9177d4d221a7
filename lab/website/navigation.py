"""Which pages the site has, in which order. ``tests/test_site.py`` names a page that is missing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HOME = "README"

NAVIGATION: Mapping[str, Sequence[str]] = {
    "Get started": ("docs/README", "docs/quickstart", "docs/tutorial", "docs/support_matrix", "docs/comparison"),
    "Guides": (
        "docs/engine_servers",
        "docs/recipes",
        "docs/trtllm",
        "docs/trtllm_configuration",
        "engine_configs/README",
        "launch/README",
        "docs/trtllm_examples",
        "docs/global_router",
        "pool_configs/README",
        "docs/disaggregation",
        "docs/kubernetes",
        "docs/bare_metal",
        "docs/several_hosts",
        "docs/gateway",
        "docs/multimodal",
        "docs/coding_agents",
    ),
    "Operate": (
        "docs/production",
        "docs/operations",
        "docs/observability",
        "docs/troubleshooting",
        "docs/runbooks/README",
        "docs/security",
    ),
    "Reference": (
        "docs/http_api",
        "docs/configuration",
        "docs/metrics",
        "docs/policies",
        "docs/architecture",
    ),
    "Benchmarks": ("docs/benchmarks", "docs/measuring", "tests/data/README"),
    "Internals": (
        "workers/README",
        "docs/internals/engines",
        "docs/internals/simulated_engine",
        "src/poolgrid/server/frontend/README",
        "docs/internals/parsers",
        "docs/internals/consolidator",
        "docs/internals/journal",
        "docs/internals/request_life",
        "docs/internals/wire",
        "tests/fault_simulation/README",
        "lab/attacks/README",
    ),
    "Contribute": (
        *("CONTRIBUTING", "docs/decisions/README"),
        *("RELEASING", "MAINTAINERS", "CODE_OF_CONDUCT", "SECURITY"),
    ),
    "Release notes": ("CHANGELOG",),
}
"""Pages by heading, as paths from the root of the repository, without the ``.md``."""

BELOW: Mapping[str, str] = {"docs/decisions/README": "docs/decisions", "docs/runbooks/README": "docs/runbooks"}
"""Pages that list all others of a directory."""


def table_of_contents(entries: Sequence[str], caption: str = "") -> str:
    """Return the hidden list by which Sphinx finds pages, as Markdown."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{entry}" for entry in entries), "```", ""])
