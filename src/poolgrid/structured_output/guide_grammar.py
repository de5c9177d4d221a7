"""A request's guide as ``llguidance`` takes it: for the simulated engine, and for who tries a guide before a worker.

Both go one way, so that what the one has compiled the other can compile. Nothing of the library is loaded on import.
"""

from __future__ import annotations

import json
from typing import Any

from poolgrid.structured_output.structural_tags import lark_grammar
from poolgrid.wire.requests import Sampling


def matcher(tokenizer: Any, sampling: Sampling) -> Any:
    """Return the ``LLMatcher`` of a request's guide over an ``LLTokenizer``; raises ``ValueError`` with the reason."""
    from llguidance import LLMatcher

    try:
        # Its constructor never raises: it makes a matcher in error.
        made = LLMatcher(tokenizer, _grammar(sampling), log_level=0)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if made.is_error():
        raise ValueError(error_of(made))
    return made


def error_of(matcher: Any) -> str:
    """Return what a matcher in error reports, without the library's state, which says nothing to a client."""
    text: str = matcher.get_error()
    said = " ".join(text.partition("<state>")[0].split())
    return NOTHING_KEEPS_TO_IT if said in ("", "NoExtensionBias") else said


NOTHING_KEEPS_TO_IT = "no text keeps to it"


def _grammar(sampling: Sampling) -> str:
    """Return the grammar of a request's guide in the library's own form; raises ``ValueError``."""
    from llguidance import LLMatcher, grammar_from

    if sampling.guided_json is not None:
        # No white space between tokens: its length would be one more thing that has to end.
        return LLMatcher.grammar_from_json_schema(
            sampling.guided_json.decode(), overrides={"whitespace_flexible": False}
        )
    if sampling.guided_regex is not None:
        return grammar_from("regex", sampling.guided_regex)
    if sampling.guided_grammar is not None:
        return grammar_from("ebnf", sampling.guided_grammar)
    if sampling.guided_choice is not None:
        return grammar_from("choice", json.dumps(sampling.guided_choice))
    assert sampling.structural_tag is not None, "the request has a guide"
    return LLMatcher.grammar_from_lark(lark_grammar(sampling.structural_tag, terse=True))
