"""The requests that have a leg on some worker, by connection: what links say becomes events whose effects follow.

Both routers have one. What differs between them is their ``Books``, and how they place the next leg.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol, assert_never

from poolgrid.serving.effects import Avoid, Blame, Cancel, Crowded, Effect, End, Full, Heard, PlaceNext, Release
from poolgrid.serving.happened import Happened
from poolgrid.serving.leg_spans import follow_legs
from poolgrid.serving.legs import Dispatch
from poolgrid.serving.request_machine import RequestMachine
from poolgrid.serving.worker_links import Link
from poolgrid.wire.requests import FinishReason, Generate, TokenDelta

log: Final = logging.getLogger(__name__)

_NOBODY: Final[dict[str, RequestMachine]] = {}

CHANGES_PER_TURN: Final = 16
"""First outputs and ends that are taken before the loop gets its turn: each costs a tenth of a millisecond, and the
sequences of one request, up to 128 of them, mostly begin and end in one step of an engine."""

GOES_ON: Final = frozenset({None, FinishReason.PREFILLED, FinishReason.ENCODED})
"""Finish reasons behind which a worker still computes, or keeps something."""


class Books(Protocol):
    """What a router keeps about the requests under way: what they hold at workers, and what workers are worth."""

    def heard(self, machine: RequestMachine, heard: Heard) -> None:
        """Take note of a leg's first output, its cached tokens, or its end."""
        ...

    def release(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Take a leg off its worker's books."""
        ...

    def avoid(self, machine: RequestMachine, avoid: Avoid) -> None:
        """Have a leg's worker come last when the request is placed again, or not at all."""
        ...

    def full(self, machine: RequestMachine, full: Full) -> None:
        """Send a leg's worker nothing for some time."""
        ...

    def blame(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        """Hold a failure against a leg's worker and its pool."""
        ...

    def crowded(self, machine: RequestMachine, dispatch: Dispatch, booked_tokens: int) -> None:
        """Take note of what a worker has really promised to compute."""
        ...

    def ended(self, machine: RequestMachine, end: End) -> None:
        """Close the books of a request."""
        ...


class InFlight:
    """Who is on which link."""

    def __init__(
        self,
        books: Books,
        place_next: Callable[[RequestMachine, PlaceNext], None],
        link_of: Callable[[str], Link | None],
        on_fault: Callable[[str], None],
    ) -> None:
        """``place_next`` finds a worker for what comes next, at once or when there is room; ``link_of`` an endpoint's
        link; ``on_fault`` is told of faults: ``unknown_request``, ``position``, ``exception``."""
        self._books = books
        self._place_next = place_next
        self._link_of = link_of
        self._on_fault = on_fault
        self._on_link: dict[str, dict[str, RequestMachine]] = {}

    def generate(self, link: Link, message: Generate) -> bool:
        """Send a leg, at once to a worker on whose link nothing is under way; return False when that is not possible.

        A worker with something to do would wait for its engine's step: for it what is sent in one turn of the loop
        leaves together. ``sent`` is next.
        """
        return link.generate(message, not self.holds(link.endpoint))

    def sent(self, machine: RequestMachine) -> None:
        """Take note that a request's current leg was sent."""
        dispatch = machine.plan.current
        assert dispatch is not None, "a leg was begun"
        self._on_link.setdefault(dispatch.endpoint, {})[dispatch.id] = machine

    def holds(self, endpoint: str) -> bool:
        return bool(self._on_link.get(endpoint))

    def endpoints(self) -> list[str]:
        return list(self._on_link)

    def under_way(self, endpoint: str) -> list[str]:
        return list(self._on_link.get(endpoint, _NOBODY))

    def on_tokens(self, link: Link, deltas: Iterator[TokenDelta]) -> bool:
        """Take a worker's output, as much of it as one turn may; return whether that was all."""
        on_link = self._on_link.get(link.endpoint, _NOBODY)
        changes = 0
        for delta in deltas:
            machine = on_link.get(delta.request_id)
            if machine is None:
                if delta.finish_reason in GOES_ON:
                    # Of a request that ended here: no worker computes for nobody, or keeps KV for nobody.
                    self._on_fault("unknown_request")
                    link.cancel(delta.request_id)
                continue
            try:
                if machine.extend(delta):
                    continue
                self.carry_out(machine, machine.on_delta(delta))
            except Exception as error:
                self._break(machine, delta.request_id, error)
            changes += 1
            if changes == CHANGES_PER_TURN:
                return False
        return True

    def _break(self, machine: RequestMachine, dispatch_id: str, error: Exception) -> None:
        """Move one request whose output could not be handled: the rest of the message is other requests'."""
        self._on_fault("exception")
        request = machine.request
        log.error(
            "request %s: handling output failed: this is a bug", dispatch_id, exc_info=error, extra=request.named()
        )
        why = f"handling output failed: {error!r}"
        self.carry_out(machine, machine.on_lost(dispatch_id, Happened.BROKEN, why))

    def on_lost(self, endpoint: str, happened: Happened, why: str) -> None:
        """Have what was on a worker that is ``LOST``, or has ``LEFT``, go on elsewhere."""
        for dispatch_id, machine in list(self._on_link.get(endpoint, _NOBODY).items()):
            self.carry_out(machine, machine.on_lost(dispatch_id, happened, why))

    def carry_out(self, machine: RequestMachine, effects: tuple[Effect, ...]) -> None:
        """Carry out what follows from an event."""
        books = self._books
        trace = machine.request.trace
        if trace is not None:
            follow_legs(trace, machine, effects)  # first: what is placed next is linked to what was lost
        for effect in effects:
            # Exact types, those of every request first.
            if type(effect) is Heard:
                books.heard(machine, effect)
            elif type(effect) is Release:
                self._forget(machine, effect.dispatch)
                books.release(machine, effect.dispatch)
            elif type(effect) is End:
                if effect.last.poison:
                    request = machine.request
                    log.error(
                        "request %s is not moved again: %s",
                        request.request_id,
                        effect.last.error,
                        extra=request.named(),
                    )
                books.ended(machine, effect)
            elif type(effect) is Cancel:
                link = self._link_of(effect.dispatch.endpoint)
                if link is not None and link.is_up:
                    link.cancel(effect.dispatch.id)
            elif type(effect) is Avoid:
                books.avoid(machine, effect)
            elif type(effect) is Full:
                books.full(machine, effect)
            elif type(effect) is Blame:
                if effect.happened is Happened.OUT_OF_PLACE:
                    self._on_fault("position")
                    worker = str(effect.dispatch.worker)
                    named = machine.request.named(worker=worker)
                    log.warning("request %s: output of %s is out of place", effect.dispatch.id, worker, extra=named)
                books.blame(machine, effect.dispatch)
            elif type(effect) is Crowded:
                books.crowded(machine, effect.dispatch, effect.booked_tokens)
            elif type(effect) is PlaceNext:
                self._place_next(machine, effect)
            else:
                assert_never(effect)

    def _forget(self, machine: RequestMachine, dispatch: Dispatch) -> None:
        on_link = self._on_link.get(dispatch.endpoint)
        if on_link is not None and on_link.get(dispatch.id) is machine:
            del on_link[dispatch.id]
            if not on_link:
                del self._on_link[dispatch.endpoint]
