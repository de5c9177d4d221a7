"""How many tokens the endpoint makes of a word, so that prompts of words have the length that was asked for.

Two requests of known numbers of words are sent; from the tokens that the endpoint counts follow the tokens of a word,
and those that its chat template adds. An endpoint that reports no usage is left at one token a word.
"""

from __future__ import annotations

import msgspec

from poolgrid.tools.bench.client import Client
from poolgrid.tools.bench.prompt import ONE_TOKEN_A_WORD, PlannedRequest, PromptMaker, WordScale
from poolgrid.tools.bench.runner import RequestShape
from poolgrid.wire.hashing import stable_u64

PROBE_WORDS = (64, 448)
"""Words of the two requests: far enough apart that their difference tells a word's tokens within a percent."""


async def measure_word_scale(client: Client, shape: RequestShape) -> WordScale:
    """Return what a word is for an endpoint; raises ``RequestFailed`` when it does not answer."""
    prompts = PromptMaker(0, 1)
    shape = msgspec.structs.replace(shape, ignore_eos=False)
    counted: list[int] = []
    for words in PROBE_WORDS:
        probe = PlannedRequest(0, None, (stable_u64(f"probe/{words}"),), words, words, 1)
        exchange = await client.post(shape.path, shape.body(probe, prompts))
        if exchange.usage is None:
            return ONE_TOKEN_A_WORD
        counted.append(exchange.usage.prompt_tokens)
    few, many = PROBE_WORDS
    tokens_per_word = (counted[1] - counted[0]) / (many - few)
    if tokens_per_word <= 0:
        return ONE_TOKEN_A_WORD
    return WordScale(tokens_per_word, max(0, round(counted[0] - few * tokens_per_word)))
