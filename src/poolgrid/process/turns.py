"""How much of what one connection brings is handed over in a turn of the event loop; the rest follows in the next."""

from __future__ import annotations

MESSAGES_PER_TURN = 64
"""Messages handed over before the loop gets its turn again: a flood of one server costs others some milliseconds."""

TURN_S = 0.001
"""Time after which the loop gets its turn, however few messages that were: a frame of a worker may hold the tokens of
hundreds of requests."""

WITHOUT_A_CLOCK = 2
"""So few messages are handed over without asking for the time; mostly there are no more."""
