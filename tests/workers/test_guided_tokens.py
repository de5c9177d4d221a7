"""The simulated engine keeps to guides: every answer does, it is the same wherever it is made, and it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.requests import Generate, RefusalKind, Routing, Sampling
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.guided_tokens import GuidedTokens
from poolgrid.plugins.simulated.core.kv_transfer import KvSource
from poolgrid.plugins.simulated.core.next_token import STOP, Vocabulary
from poolgrid.plugins.simulated.guides import LazyGuides
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.examples import examples
from tests.wire.test_guide_limits import chain, rules
from tests.workers.builders import outputs, prefill, run_through, run_to_end

VOCABULARY = Vocabulary(4096, 3, 2)
GUIDES = LazyGuides(TINY_MODEL_PATH, VOCABULARY)
TOKENIZER = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "score": {"type": "number"},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "colour": {"enum": ["red", "green"]},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "score", "mail", "tags", "colour", "friend"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}


def asked(seed: int = 0, max_tokens: int = 512, **sampling: Any) -> Generate:
    return Generate("r", pack_tokens((5, 6, 7)), Sampling(max_tokens, seed=seed, **sampling))


def stream(request: Generate) -> GuidedTokens:
    made = GuidedTokens(VOCABULARY, request.token_ids, request, GUIDES)
    made.generate_to(request.sampling.max_tokens)
    return made


def text_of(made: GuidedTokens) -> str:
    text: str = TOKENIZER.decode(list(unpack_tokens(bytes(made.output))))
    return text


def engine(limits: SimulatedLimits | None = None) -> SimulatedEngine:
    return SimulatedEngine(
        limits or SimulatedLimits(block_size=8, total_kv_blocks=256),
        VOCABULARY,
        guides=GUIDES,
        source=KvSource("tcp://here:1", "w", 1),
    )


@pytest.mark.parametrize("guide", [{"guided_json": json.dumps(chain(1000)).encode()}, {"guided_grammar": rules(4000)}])
def test_a_worker_that_is_asked_past_a_router_does_not_die_of_a_guide_either(guide: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="allowed are"):
        GUIDES.open(Sampling(1, **guide))


@pytest.mark.parametrize(
    "schema", [PERSON, {"type": "object"}, {}, {"type": "array", "items": {"type": "integer"}, "minItems": 3}]
)
def test_answers_keep_to_a_schema_and_end(schema: dict[str, Any]) -> None:
    texts = set()
    for seed in range(40):
        made = stream(asked(seed, guided_json=json.dumps(schema).encode()))
        assert made.finish_reason == STOP
        jsonschema_rs.validate(schema, json.loads(text_of(made)))
        texts.add(text_of(made))
    assert len(texts) > 3, "the seed decides, too"


LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 3, "maxLength": 6},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"},
        {"type": "string", "format": "uuid"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"enum": ["a", 3, None]},
        {},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(("name", "ünï", "a b")), inner, max_size=3).map(
            lambda found: {"type": "object", "properties": found, "required": sorted(found)}
        ),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found}),
    ),
    max_leaves=8,
)


TOKENS = 800


def about_least_tokens(schema: dict[str, Any]) -> int:
    """Return about how many tokens the shortest answer has, of the longest kind that the schema leaves a choice of."""
    if "anyOf" in schema:
        return max(map(about_least_tokens, schema["anyOf"]))
    if schema.get("type") == "array":
        return 2 + int(schema["minItems"]) * (2 + about_least_tokens(schema["items"]))
    if schema.get("type") == "object":
        return 2 + sum(6 + len(name) + about_least_tokens(inner) for name, inner in schema["properties"].items())
    return 40 if schema.get("format") == "uuid" else 20


def fits(schema: Any) -> bool:
    return about_least_tokens(schema) < TOKENS // 2


@given(schema=SCHEMAS.filter(fits), seed=st.integers(0, 100))
@settings(max_examples=examples(26))
def test_answers_keep_to_any_schema_and_end(schema: dict[str, Any], seed: int) -> None:
    made = stream(asked(seed, TOKENS, guided_json=json.dumps(schema).encode()))
    assert made.finish_reason == STOP
    jsonschema_rs.validate(schema, json.loads(text_of(made)))


@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        ({"guided_regex": r"[a-z]+@[a-z]+\.(com|org)"}, r"[a-z]+@[a-z]+\.(com|org)"),
        ({"guided_regex": "[0-9]+-[0-9]+"}, "[0-9]+-[0-9]+"),
        ({"guided_choice": ("yes", "no", 'maybe "é"\n')}, '(yes|no|maybe "é"\n)'),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"structural_tag": json.dumps(TAG)}, r"(<f>-?\d+</f>|[^<]|<(?!f))*"),
    ],
)
def test_answers_keep_to_every_other_kind_of_guide(sampling: dict[str, Any], pattern: str) -> None:
    for seed in range(20):
        made = stream(asked(seed, **sampling))
        assert made.finish_reason == STOP
        assert re.fullmatch(pattern, text_of(made)), text_of(made)


def test_an_answer_goes_on_elsewhere_with_the_very_same_tokens_wherever_it_was_cut() -> None:
    for guide in ({"guided_json": json.dumps(PERSON).encode()}, {"guided_regex": "([a-z]+@)+x"}):
        request = asked(3, 120, **guide)
        whole = stream(request)
        tokens = bytes(whole.output)
        for cut in range(len(tokens) // 4):
            rest = stream(
                msgspec.structs.replace(
                    request,
                    token_ids=request.token_ids + tokens[: 4 * cut],
                    sampling=msgspec.structs.replace(request.sampling, max_tokens=120 - cut),
                    routing=Routing(emitted_tokens=cut),
                )
            )
            assert tokens[: 4 * cut] + bytes(rest.output) == tokens
            assert rest.finish_reason == whole.finish_reason


def test_prefill_here_and_decode_there_is_the_same_as_the_whole_on_one_engine() -> None:
    request = asked(7, guided_json=json.dumps(PERSON).encode())
    alone = engine()
    alone.submit(request, 0.0)
    whole = outputs(run_to_end(alone))["r"]

    source, target = engine(), engine()
    leg, offer, now_ms = prefill(source, request)
    target.submit(leg, now_ms, offer=offer)

    assert outputs(run_through(target, now_ms))["r"] == whole == bytes(stream(request).output)


def test_a_guided_request_that_gives_up_its_blocks_says_the_same() -> None:
    requests = [
        msgspec.structs.replace(asked(seed, 100, guided_json=json.dumps(PERSON).encode()), request_id=str(seed))
        for seed in range(4)
    ]
    crowded = engine(SimulatedLimits(block_size=4, total_kv_blocks=40))
    for request in requests:
        crowded.submit(request, 0.0)
    outcomes = run_to_end(crowded)

    assert sum(outcome.preemptions for outcome in outcomes) > 0
    assert outputs(outcomes) == {request.request_id: bytes(stream(request).output) for request in requests}


def test_log_probabilities_name_no_token_twice() -> None:
    made = stream(asked(guided_json=json.dumps(PERSON).encode(), logprobs=5))
    assert made.final is not None
    for place, (entry, token_id) in enumerate(
        zip(made.logprobs(0, made.final, 5), unpack_tokens(bytes(made.output)), strict=True)
    ):
        listed = [alternative for alternative, _ in entry.alternatives]
        assert listed[0] == entry.token_id == token_id, place
        assert len(set(listed)) == 5


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"guided_json": b'{"type": "nonsense"}'}, "guided_json is set.*nonsense"),
        ({"guided_json": b"["}, "guided_json is set"),
        ({"guided_json": b'{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"guided_regex": "(?=a)b"}, "guided_regex is set.*look-around"),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar is set"),
        ({"structural_tag": '{"structures": [1], "triggers": ["<f"]}'}, "a structure is 1"),
        ({"structural_tag": "[]"}, "allowed is an object with a format, or with lists of structures"),
        ({"structural_tag": json.dumps(TAG | {"triggers": ["<g"]})}, "no trigger begins '<f>'"),
    ],
)
def test_a_guide_that_cannot_be_kept_to_is_refused_with_the_reason(sampling: dict[str, Any], named: str) -> None:
    busy = engine()
    with pytest.raises(UnsupportedError, match=f"(?s){named}") as refusal:
        busy.submit(asked(**sampling), 0.0)
    assert refusal.value.kind is RefusalKind.INVALID
    assert busy.active_requests == 0


def test_an_output_that_breaks_its_guide_does_not_go_on_here() -> None:
    request = msgspec.structs.replace(asked(guided_regex="[0-9]+"), routing=Routing(emitted_tokens=2))
    with pytest.raises(RefusedError, match="does not keep to it") as refusal:
        engine().submit(request, 0.0)
    assert refusal.value.kind is RefusalKind.CANNOT_DO
    with pytest.raises(RefusedError, match="emitted_tokens is 9, allowed are integers up to the prompt's 3"):
        engine().submit(msgspec.structs.replace(request, routing=Routing(emitted_tokens=9)), 0.0)


@pytest.mark.parametrize("wrong", ["missing", "broken", "small"])
def test_a_tokenizer_that_cannot_be_used_refuses_guided_requests_only(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = VOCABULARY
    if wrong == "broken":
        path.write_text("{}")
    elif wrong == "small":
        path = TINY_MODEL_PATH
        vocabulary = Vocabulary(100_000, 3, 50_000)
    made = SimulatedEngine(SimulatedLimits(), vocabulary, guides=LazyGuides(path, vocabulary))
    for _ in range(2):
        with pytest.raises(UnableError, match=r"guided_regex is set, and the tokenizer at .* cannot be used") as no:
            made.submit(asked(guided_regex="a"), 0.0)
        assert no.value.kind is RefusalKind.CANNOT_DO, "another worker may have one that can be used"
    made.submit(asked(), 0.0)


def test_a_guide_that_becomes_too_much_ends_the_answer_with_an_error() -> None:
    class Tired:
        def allowed(self) -> bytes | None:
            return None

        def after(self, token_id: int) -> bytes | None:
            return None

        def accept(self, token_id: int) -> bool:
            return False

        def why(self) -> str:
            return "too many items"

    class TiredGuides:
        texts = GUIDES.texts

        def open(self, sampling: Sampling) -> Tired:
            return Tired()

    made = SimulatedEngine(SimulatedLimits(), VOCABULARY, guides=TiredGuides())
    made.submit(asked(guided_regex="a"), 0.0)
    last = run_to_end(made)[-1].deltas[-1]

    assert last.finish_reason == "error"
    assert last.error == "guided_regex cannot be kept to any further: too many items"


@pytest.mark.parametrize(
    "sampling", [{"guided_json": b'{"$ref": "#"}'}, {"guided_regex": "[^\\s\\S]"}, {"guided_grammar": "root ::= root"}]
)
def test_a_guide_to_which_no_text_keeps_is_refused_without_the_librarys_state(sampling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as refused:
        stream(asked(**sampling))
    assert str(refused.value).endswith("cannot keep to this one: no text keeps to it")


def test_a_guide_that_breaks_during_an_answer_is_the_requests_fault_and_is_named_without_the_librarys_state() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    made = stream(asked(guided_json=json.dumps(schema).encode()))
    made.generate_to(512)
    assert made.refusal is RefusalKind.INVALID
    assert made.error is not None
    assert made.error.startswith("guided_json cannot be kept to any further: ")
    assert "\n" not in made.error
    assert "<state>" not in made.error
