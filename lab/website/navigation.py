"""Which pages the site has, in which order. ``tests/test_site.py`` names a page that is missing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HOME = "README"

NAVIGATION: Mapping[str, Sequence[str]] = {
    "Get started": (
        "docs/README",
        "docs/quickstart",
        "docs/tutorial",
        "docs/support_matrix",
        "docs/comparison",
        "docs/faq",
    ),
    "Guides": (
        "docs/stock_engines",
        "docs/engine_check",
        "docs/doctor",
        "docs/kubernetes",
        "docs/bare_metal",
        "docs/slurm",
        "docs/disaggregation",
        "docs/global_router",
        "docs/pool_grids",
        "pool_configs/README",
        "docs/multimodal",
        "docs/coding_agents",
        "docs/sessions",
        "docs/sizing",
        "docs/production_checklist",
        "docs/migration",
        "docs/upgrading",
        "docs/what_if",
        "docs/trtllm",
        "docs/engine_configs",
        "docs/trtllm_tuning",
        "docs/gpt_oss_120b",
        "docs/deepseek_r1_wide_ep",
        "docs/logits_processors",
        "launch/README",
        "engine_configs/README",
    ),
    "Operate": (
        "docs/operations",
        "docs/failures",
        "docs/nats",
        "docs/gateway",
        "docs/troubleshooting",
        "docs/runbooks/README",
        "docs/observability",
        "docs/traces_and_logs",
        "docs/fleet_page",
        "docs/security",
        "docs/attacks",
    ),
    "Concepts": (
        "docs/policies",
        "docs/cost",
        "docs/architecture",
        "docs/consolidator",
        "docs/journal",
        "docs/replay",
        "docs/worker",
        "docs/engines",
        "docs/simulated_engine",
        "docs/front_end",
        "docs/parsers",
    ),
    "Reference": (
        "docs/http_api",
        "docs/command_line",
        "docs/configuration",
        "docs/metrics",
        "docs/request_life",
        "docs/wire",
        "docs/glossary",
    ),
    "Benchmarks": ("docs/benchmarks", "docs/bench", "docs/simulate", "tests/data/README"),
    "Contribute": (
        *("CONTRIBUTING", "docs/simulation_testing", "docs/decisions/README"),
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
