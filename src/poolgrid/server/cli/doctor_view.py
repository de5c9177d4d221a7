"""Verdicts as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from poolgrid.kernel.wire.answers import ModelFinding, VerdictRow
from poolgrid.server.process.figures import percent
from poolgrid.server.process.terminal_table import Heading, TerminalTable

VERDICTS_PAGE = "docs/troubleshooting.md#verdicts"
MODELS_PAGE = "docs/troubleshooting.md#models"


def uncached_line(tokens: Mapping[str, int]) -> str:
    """Return why prompt tokens were computed, in shares of all that were."""
    total = sum(tokens.values())
    shares = ", ".join(f"{name} {percent(count / total)}" for name, count in tokens.items() if total)
    return f"computed prompt tokens: {total:,}" + (f" ({shares})" if shares else "")


def view(
    rows: Sequence[VerdictRow], uncached_tokens: Mapping[str, int], models: Sequence[ModelFinding] = ()
) -> RenderableType:
    """Return a table of all workers, then a paragraph for each fault and for each finding of a model: the evidence and
    what to change."""
    headings = [Heading("worker", False), Heading("verdict", False), Heading("promised tok"), Heading("reported tok")]
    table = TerminalTable([*headings, Heading("requests")])
    for row in rows:
        style = "bold red" if row.is_fault else ""
        table.add(row.worker, Text(row.cause, style), f"{row.promised_tokens:,}", f"{row.reported_tokens:,}",
                  f"{row.requests:,}")  # fmt: skip
    parts: list[RenderableType] = [table, Text(uncached_line(uncached_tokens))]
    for row in rows:
        if row.is_fault:
            parts.append(Text.assemble((f"\n{row.worker}: {row.cause}", "bold red"), f". {row.meaning.capitalize()}."))
            parts += [Text(f"  - {each}") for each in row.evidence]
            parts.append(Text(f"  To change: {row.fix}.\n  See: {VERDICTS_PAGE}"))
    for each in models:
        style = "bold red" if each.is_fault else "bold"
        parts.append(Text.assemble((f"\nmodel {each.model}: {each.cause}", style), f". {each.meaning.capitalize()}."))
        parts += [Text(f"  - {line}") for line in each.evidence]
        parts.append(Text(f"  To change: {each.fix}.\n  See: {MODELS_PAGE}"))
    if not (any(row.is_fault for row in rows) or any(each.is_fault for each in models)):
        parts.append(Text("no fault found" if rows else "no worker to examine"))
    return Group(*parts)
