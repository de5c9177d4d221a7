"""What a worker's card must look like by itself, before anybody asks whether it fits a pool.

A card is copied into the journal and from there into every router, which connect to the addresses in it and show the
names in it to people. So it is looked at in every door that cards come through: the consolidator's, the sources file's,
and the worker's own start.
"""

from __future__ import annotations

from poolgrid.wire.addresses import http_url_problem, ip_endpoint_problem, zmq_endpoint_problem
from poolgrid.wire.card import WorkerCard, shown_value
from poolgrid.wire.output_parsers import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS

STEP_MS_MAX = 1e9
"""A step that takes longer than eleven days is a mistake."""

SHOWN_CHARS_MAX = 200
"""Characters of a refused value that are repeated in the reason."""


def name_problem(field: str, name: str, needed: bool) -> str | None:
    """Say why a name that people and labels show cannot be used, or ``None``."""
    if needed and not name:
        return f"{field} is empty, allowed are 1 to 256 characters"
    if not name.isprintable():
        return f"{field} is {name[:SHOWN_CHARS_MAX]!r}, allowed are printable characters"
    return None


def _times_problem(part: str, points: tuple[tuple[float, float], ...], least: float, most: float) -> str | None:
    """Say which point of a curve of step times is none, or ``None``."""
    before = -1.0
    for position, (x, ms) in enumerate(points):
        where = f"the card's step_times.{part}[{position}]"
        if not least <= x <= most or x <= before:
            return f"{where} is at {x:g} after {before:g}, allowed are rising values from {least:g} to {most:g}"
        if not 0.0 < ms <= STEP_MS_MAX:
            return f"{where} takes {ms:g} ms, allowed are above 0 to {STEP_MS_MAX:g}"
        before = x
    return None


def card_problem(card: WorkerCard) -> str | None:
    """Name the first field of a card that is wrong, with its value and what is allowed; ``None`` when none is."""
    names = [("model", card.model, True), ("engine", card.engine, False), ("endpoint_name", card.endpoint_name, False)]
    names += [(f"loras[{position}]", lora, True) for position, lora in enumerate(card.loras)]
    names += [(f"aliases[{position}]", alias, True) for position, alias in enumerate(card.aliases)]
    for field, name, needed in names:
        problem = name_problem(f"the card's {field}", name, needed)
        if problem is not None:
            return problem
    chat = card.chat
    for field, name, known in (
        ("reasoning_parser", chat.reasoning_parser, REASONING_PARSERS),
        ("tool_call_parser", chat.tool_call_parser, TOOL_CALL_PARSERS),
    ):
        if name and (name == AUTO or name not in known):
            allowed = ", ".join(each for each in known if each != AUTO)
            return f"the card's chat.{field} is {shown_value(name)}, allowed are {allowed}, and empty"
    problem = _times_problem("prefill", card.step_times.prefill, 0.0, float("inf")) or _times_problem(
        "decode", card.step_times.decode, 0.0, 1.0
    )
    if problem is not None:
        return problem
    if bool(card.step_times.prefill) != bool(card.step_times.decode):
        return "the card's step_times have only one of prefill and decode, allowed are both or neither"
    if card.block_size < 1:
        return f"the card's block_size is {card.block_size}, allowed are integers from 1"
    problem = zmq_endpoint_problem(card.request_endpoint)
    if problem is not None:
        return (
            f"the card's request_endpoint is {card.request_endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; "
            "allowed is tcp://host:port"
        )
    problem = http_url_problem(card.http_endpoint) if card.http_endpoint else None
    if problem is not None:
        return (
            f"the card's http_endpoint is {card.http_endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; "
            "allowed are http://host:port and https://host:port"
        )
    return _serving_problem(card)


def _serving_problem(card: WorkerCard) -> str | None:
    """Say what is wrong with where the engine's own server is, or ``None``."""
    if len(card.serving_endpoints) not in (0, 1, card.dp_size):
        return (
            f"the card's serving_endpoints are {len(card.serving_endpoints)} and its dp_size is {card.dp_size}: "
            "allowed are none, one for all ranks, and one for each"
        )
    for position, endpoint in enumerate(card.serving_endpoints):
        problem = ip_endpoint_problem(endpoint)
        if problem is not None:
            return (
                f"the card's serving_endpoints[{position}] is {endpoint[:SHOWN_CHARS_MAX]!r}, which {problem}; allowed "
                "are ip:port and [ipv6]:port"
            )
    return None
