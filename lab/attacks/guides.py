"""Attacks with what a request may carry for the engine and the template: guides, tools, templates, stop lists, bodies.

Each comes from a tenant with a key, twelve times over: one that ends a worker is then moved to every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.pool import Shape
from lab.attacks.requests import in_words, post_often

REPEATS = 12
"""The twelfth deep schema ended `poolgrid up` for good (finding 1)."""

DEEP = 1000
CHAINED_RULES = 4000
TEMPLATE = Path(__file__).with_name("looping.jinja")
ROUNDS = 10_000

Body = dict[str, Any]
Request = tuple[str, Mapping[str, Any] | bytes]


def deep_schema(depth: int) -> Body:
    """Return a schema whose references are ``depth`` deep."""
    definitions: Body = {
        f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}, "required": ["a"]}
        for at in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested_schema(depth: int) -> bytes:
    """Return a schema of arrays in arrays, as JSON: too deep for an encoder that recurses."""
    return b'{"type":"array","items":' * depth + b'{"type":"integer"}' + b"}" * depth


def chained_grammar(rules: int) -> str:
    """Return a grammar in which each rule is the next one."""
    return "\n".join(["start: r0", *(f"r{at}: r{at + 1}" for at in range(rules)), f'r{rules}: "x"'])


def wide_grammar(rules: int) -> str:
    """Return a grammar with very many ambiguous alternatives."""
    return (
        "start: a\n"
        + "a: "
        + " | ".join(f"a a | b{at}" for at in range(rules))
        + "\n"
        + "\n".join(f'b{at}: "x" | a' for at in range(rules))
    )


def _completion(model: str, **fields: Any) -> Request:
    return "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 8, **fields}


def _chat(model: str, **fields: Any) -> Request:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, **fields}
    return "/v1/chat/completions", body


def _responses(model: str, **fields: Any) -> Request:
    return "/v1/responses", {"model": model, "input": "x", "max_output_tokens": 16, "store": False, **fields}


def _format(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}


def _tool(schema: Body) -> Body:
    return {
        "tools": [{"type": "function", "function": {"name": "deep", "strict": True, "parameters": schema}}],
        "tool_choice": "required",
    }


def sending(make: Callable[[str], list[Request]], times: int = REPEATS, at_once: int = 4) -> Run:
    """Return an attack that sends requests, made for a model, again and again."""

    async def run(scene: Scene) -> Outcome:
        return Outcome(in_words(await post_often(scene, make(scene.pool.model.name), times, at_once)))

    return run


def _deep_json(model: str) -> list[Request]:
    return [_completion(model, guided_json=deep_schema(DEEP))]


def _deep_elsewhere(model: str) -> list[Request]:
    schema = deep_schema(DEEP)
    return [
        _chat(model, response_format=_format(schema)),
        _chat(model, **_tool(schema)),
        _responses(model, text={"format": {"type": "json_schema", "name": "deep", "schema": schema}}),
        _chat(model, structural_tag=_structural_tag(schema)),
        _chat(model, response_format={"type": "structural_tag", **_structural_tag(schema)}),
    ]


def _structural_tag(schema: Body) -> Body:
    return {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}


def _nested(model: str) -> list[Request]:
    nested = nested_schema(10_000)
    return [
        ("/v1/completions", b'{"model":"%s","prompt":"x","max_tokens":8,"guided_json":%s}' % (model.encode(), nested)),
        (
            "/v1/chat/completions",
            b'{"model":"%s","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
            b'"json_schema":{"name":"n","schema":%s}}}' % (model.encode(), nested),
        ),
        _completion(model, guided_json=json.loads(nested_schema(200))),
    ]


def _wide(model: str) -> list[Request]:
    properties = {f"p{at}": {"type": "string", "pattern": "^(a|b|ab){1,200}$"} for at in range(500)}
    choices = {"anyOf": [{"type": "object", "properties": properties} for _ in range(20)]}
    return [
        _completion(model, guided_json={"type": "object", "properties": properties}),
        _completion(model, guided_json=choices),
        _completion(model, guided_json={"enum": [f"value {at}" * 8 for at in range(10_000)]}),
        _completion(model, guided_json={"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
        _completion(model, guided_json={"type": "array", "minItems": 10**9, "items": {"type": "integer"}}),
        _completion(model, guided_json={"type": "string", "minLength": 10**8, "maxLength": 10**9}),
    ]


def _grammars(model: str) -> list[Request]:
    return [
        _completion(model, guided_grammar=chained_grammar(CHAINED_RULES)),
        _completion(model, guided_grammar=wide_grammar(1000)),
        _completion(model, guided_grammar='start: "' + "(" * 50_000 + '"'),
        _completion(model, guided_grammar="start: " + "(" * 5000 + '"x"' + ")" * 5000),
        _completion(model, guided_grammar="start: start start | start\n"),
    ]


def _expressions(model: str) -> list[Request]:
    return [
        _completion(model, guided_regex=expression)
        for expression in (
            "((a{0,1000}){0,1000}){0,1000}",
            "(((a*)*)*)*b",
            "(x+x+)+y",
            "(a|aa)+$" * 200,
            "." * 100_000,
            "(" * 5000 + "a" + ")" * 5000,
            "(.*a){200}",
            "[\\p{L}\\p{N}]{1,100000}",
            "|".join(f"{at:06d}.*{at:06d}" for at in range(3000)),
        )
    ]


def _choices(model: str) -> list[Request]:
    return [
        _completion(model, guided_choice=["a" * at for at in range(1, 1000)]),
        _completion(model, guided_choice=["x" * 1000 + str(at) for at in range(1000)]),
    ]


def _stops(model: str) -> list[Request]:
    return [
        _completion(model, stop=["x" * 256] * 16),
        _completion(model, stop=[f"s{at}" for at in range(200_000)]),
        _completion(model, stop=["y" * 5_000_000]),
        _completion(model, stop_token_ids=list(range(500_000))),
        _completion(model, logit_bias={str(at): 1 for at in range(100_000)}),
        _completion(model, bad_words=[f"w{at}" for at in range(100_000)]),
        _completion(model, n=128, best_of=128, max_tokens=64),
        _completion(model, prompt=["x"] * 100_000),
    ]


def _bodies(model: str) -> list[Request]:
    name = model.encode()
    return [
        ("/v1/completions", b"[" * 5_000_000),
        ("/v1/completions", b'{"a":' * 2_000_000),
        ("/v1/completions", b'{"model":"%s","max_tokens":1,"prompt":[%s1]}' % (name, b"1," * 8_000_000)),
        ("/v1/completions", b'{"model":"%s","max_tokens":1,"prompt":"%s"}' % (name, b"word " * 6_000_000)),
        ("/v1/completions", b'{"model":"%s","max_tokens":1,"prompt":"%s"}' % (name, b"\\u00e9" * 5_000_000)),
        ("/v1/completions", b'{"model":"%s","prompt":"x","max_tokens":%s}' % (name, b"9" * 1_000_000)),
        (
            "/v1/chat/completions",
            b'{"model":"%s","max_tokens":1,"messages":[%s]}'
            % (name, b",".join([b'{"role":"user","content":"x"}'] * 500_000)),
        ),
        ("/v1/chat/completions", b'{"model":"%s","messages":"%s"}' % (name, b"x" * 20_000_000)),
        ("/v1/completions", b"\x00" * 30_000_000),
    ]


def _small_bodies(model: str) -> list[Request]:
    name = model.encode()
    return [
        ("/v1/completions", b"[" * 200_000),
        ("/v1/completions", b'{"a":' * 100_000),
        ("/v1/completions", b'{"model":"%s","max_tokens":1,"prompt":[%s1]}' % (name, b"1," * 200_000)),
        ("/v1/completions", b'{"model":"%s","prompt":"x","max_tokens":%s}' % (name, b"9" * 100_000)),
    ]


async def _body_attack(scene: Scene) -> Outcome:
    requests = (_bodies if scene.share >= 1 else _small_bodies)(scene.pool.model.name)
    return Outcome(in_words(await post_often(scene, requests, 2, 2)))


def _templates(model: str) -> list[Request]:
    return [
        _chat(model, chat_template_kwargs={"rounds": ROUNDS}),
        _chat(model, chat_template_kwargs={"rounds": 10**9}),
        _chat(model, chat_template="{{ 'x' * 10**10 }}"),
    ]


PART = Part(
    "guides",
    "Guides, lists and templates in requests",
    (
        Attack("deep references", "Sends a schema 1,000 `$ref` deep as `guided_json`.", sending(_deep_json)),
        Attack(
            "deep references elsewhere",
            "Sends it as `response_format`, as a tool's parameters, as a structural tag and to `/v1/responses`.",
            sending(_deep_elsewhere),
            short=False,
        ),
        Attack("nested schemas", "Sends schemas with up to 10,000 nested arrays.", sending(_nested), short=False),
        Attack(
            "wide schemas", "Sends schemas of many patterns, alternatives and huge counts.", sending(_wide), short=False
        ),
        Attack(
            "grammars",
            "Sends 4,000 chained rules, 1,000 ambiguous ones, deep brackets.",
            sending(_grammars),
            short=False,
        ),
        Attack("expressions", "Sends regular expressions that explode.", sending(_expressions), short=False),
        Attack("choices", "Sends a thousand long choices.", sending(_choices), short=False),
        Attack(
            "lists", "Sends huge stop lists, biases, bad words, choices and prompts.", sending(_stops, 2), short=False
        ),
        Attack("bodies", "Sends bodies of 30 MB: deep, long, of numbers, of nothing.", _body_attack, short=False),
        Attack(
            "templates",
            "Makes the operator's template loop a billion times, and sends a template of its own.",
            sending(_templates, 3),
            Shape(router=("--chat-template", str(TEMPLATE))),
            short=False,
        ),
    ),
)
