"""Findings about reuse: cached tokens as the server reports them, against the events before the probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from poolgrid.process.figures import counted
from poolgrid.tools.engine_check.core.finding import Finding, Kind, fault, warning
from poolgrid.tools.engine_check.core.said import RankStream
from poolgrid.tools.engine_check.core.views import ExpectedPath, RouterView

CACHED_TOKENS_OPTION = "--enable-prompt-tokens-details (vLLM), --enable-cache-report (SGLang)"
CACHING_OPTION = "--enable-prefix-caching (vLLM); no --disable-radix-cache (SGLang); enable_block_reuse (TensorRT-LLM)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One probe: what a router would have predicted when it was sent, and what the server reported."""

    path: ExpectedPath
    predicted: int
    reported: int


@dataclass(slots=True)
class ReuseFigures:
    """All probes whose cached tokens were reported."""

    comparisons: list[Comparison] = field(default_factory=list)
    unsaid: int = 0

    @property
    def equal(self) -> int:
        return sum(each.predicted == each.reported for each in self.comparisons)


def compare(
    paths: Sequence[ExpectedPath], views: Mapping[int, RouterView], block_size: int, figures: ReuseFigures
) -> None:
    """Advance the views from probe to probe, and compare each prediction with its report."""
    for path in paths:
        for view in views.values():
            view.advance(path.exchange.heard_before)
        if path.exchange.cached_tokens is None:
            figures.unsaid += 1
            continue
        rank = path.probe.rank
        if rank is None and len(views) > 1:
            continue  # which rank served it is not known
        served_by = views.get(rank or 0) or next(iter(views.values()), None)
        held = 0
        for name in path.names[: path.reusable_blocks(block_size)]:
            if served_by is None or name not in served_by.held:
                break
            held += 1
        figures.comparisons.append(Comparison(path, held * block_size, path.exchange.cached_tokens))


def reuse_findings(
    figures: ReuseFigures, paths: Sequence[ExpectedPath], streams: Mapping[int, RankStream], block_size: int
) -> Iterator[Finding]:
    """Yield where predictions and reports differ."""
    if figures.unsaid:
        yield warning(
            Kind.CACHED_TOKENS_UNSAID,
            f"probe {next(path.probe.name for path in paths if path.exchange.cached_tokens is None)!r}",
            f"{counted(figures.unsaid, 'answer')} without usage.prompt_tokens_details.cached_tokens: whether the "
            "engine reuses the blocks of its events is unknown",
            CACHED_TOKENS_OPTION,
        )
    stored = any(True for stream in streams.values() for _ in stream.stored())
    again = [each for each in figures.comparisons if _sent_before(each.path, paths)]
    if again and not stored and not any(each.reported for each in figures.comparisons):
        yield fault(
            Kind.CACHING_OFF,
            f"probe {again[0].path.probe.name!r}",
            "a prompt that was sent before was computed again, and no block was stored: the prefix cache is off",
            CACHING_OPTION,
        )
        return
    wrong = [each for each in figures.comparisons if each.predicted != each.reported]
    if not wrong:
        return
    first = wrong[0]
    words = (
        f"{len(wrong)} of {counted(len(figures.comparisons), 'probe')}; first {first.reported} tokens were reported "
        f"and {first.predicted} were expected from the events"
    )
    place = f"probe {first.path.probe.name!r}"
    hits = [each for each in figures.comparisons if each.predicted]
    if hits and all(each.predicted - each.reported == block_size for each in hits):
        words += ": always one block less, as with speculative decoding, which computes the last cached block again"
        yield warning(Kind.CACHED_TOKENS_DIFFER, place, words)
    elif hits and not any(each.reported for each in hits):
        words += ": no block of the events is reused"
        yield fault(Kind.CACHED_TOKENS_DIFFER, place, words, CACHING_OPTION)
    elif all(0 < each.reported - each.predicted < block_size for each in wrong):
        words += ": the engine reuses parts of blocks"
        yield warning(Kind.CACHED_TOKENS_DIFFER, place, words)
    else:
        yield fault(Kind.CACHED_TOKENS_DIFFER, place, words)


def _sent_before(path: ExpectedPath, paths: Sequence[ExpectedPath]) -> bool:
    """Return whether the whole prompt was sent in an earlier probe of the same domain and rank."""
    mine = (path.probe.salt, path.probe.lora, path.probe.rank)
    return any(
        before.number < path.number
        and (before.probe.salt, before.probe.lora, before.probe.rank) == mine
        and before.probe.tokens[: len(path.probe.tokens)] == path.probe.tokens
        for before in paths
    )
