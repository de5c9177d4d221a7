"""Which pages the site has, in which order. ``tests/test_site.py`` names a page that is missing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HOME = "README"

NAVIGATION: Mapping[str, Sequence[str]] = {
    "Start": ("docs/tutorial", "docs/glossary", "docs/results", "docs/upgrading"),
    "Use": (
        "docs/http_api",
        "docs/coding_agents",
        "docs/multimodal",
        "docs/parsers",
        "docs/logits_processors",
        "docs/policies",
        "docs/predicted",
        "docs/bench",
        "docs/simulate",
        "docs/what_if",
    ),
    "Run": (
        "docs/operations",
        "docs/bare_metal",
        "docs/kubernetes",
        "docs/slurm",
        "docs/fleet_page",
        "docs/engine_check",
        "docs/command_line",
        "docs/configuration",
        "docs/metrics",
        "docs/observability",
        "docs/traces_and_logs",
        "docs/runbooks/README",
        "docs/security",
        "docs/attacks",
        "docs/stock_engines",
        "docs/disaggregation",
        "docs/global_router",
        "docs/pool_grids",
        "docs/pool_selection",
        "pool_configs/README",
    ),
    "TensorRT-LLM": (
        "docs/trtllm",
        "launch/README",
        "docs/trtllm_tuning",
        "docs/gpt_oss_120b",
        "docs/deepseek_r1_wide_ep",
        "docs/engine_configs",
        "engine_configs/README",
    ),
    "How it works": (
        "docs/architecture",
        "docs/renamed",
        "docs/front_end",
        "docs/request_life",
        "docs/wire",
        "docs/consolidator",
        "docs/journal",
        "docs/replay",
        "docs/worker",
        "docs/engines",
        "docs/simulated_engine",
        "docs/simulation_testing",
        "docs/decisions/README",
    ),
    "Project": (
        *("CONTRIBUTING", "CHANGELOG", "SECURITY", "RELEASING", "MAINTAINERS", "CODE_OF_CONDUCT"),
        "tests/data/README",
    ),
}
"""Pages by heading, as paths from the root of the repository, without the ``.md``."""

BELOW: Mapping[str, str] = {"docs/decisions/README": "docs/decisions", "docs/runbooks/README": "docs/runbooks"}
"""Pages that list all others of a directory."""


def table_of_contents(entries: Sequence[str], caption: str = "") -> str:
    """Return the hidden list by which Sphinx finds pages, as Markdown."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *(f"/{entry}" for entry in entries), "```", ""])
