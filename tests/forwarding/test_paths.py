"""Which targets reach a server for whom: the routes of the engines, in every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.event_filter import ApiForm
from poolgrid.server.forwarding.paths import (
    CLIENT_ROUTES,
    MAX_DECODINGS,
    RESERVED_PREFIXES,
    RESERVED_ROUTES,
    STATEFUL_COLLECTIONS,
    TargetAccess,
    read_target,
)
from tests.cases import for_each
from tests.forwarding.engine_routes import CLIENTS, OPERATORS

CHANGING = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/v1/kv_cache_hints", "/metrics"]

SPELLINGS = [
    "{0}", "{0}/", "{0}//", "{0}?x=/v1/models", "{0};/v1", "{0};a=b?c", "{upper}", "{coded}", "{twice}", "{thrice}",
    "/v1/..{0}", "/v1/%2e%2e{0}", "/v1/%252e%252e{0}", "/v1/.{0}", "/v1/x/../..{0}", "/v1/..%2f{1}", "/v1/..;{0}",
    "/v1/..;x=y{0}", "/v1\\..\\{1}", "/v1/%5c..%5c{1}", "//v1{0}", "//host{0}", "http://host/v1", "http://host{0}",
    "host:80", "*", "", "{1}", "/v1/..%00{0}", "{0}%00", "{0}%0a", "{0}%20", "{0}#x", "{0} ", "{0}%", "{0}%zz",
    "/./{1}", "/.{0}", "{0}/.", "{0}/..", "{0}/%2e", "/%2f{1}", "/{0}", "{0}/../v1/models", "{0}/..;/v1/models",
]  # fmt: skip


@for_each("path", CLIENTS)
def test_paths_of_clients(path: str) -> None:
    assert read_target(path.encode()).access is TargetAccess.CLIENT


@for_each("path", OPERATORS)
def test_paths_of_operators(path: str) -> None:
    assert read_target(path.encode()).access is TargetAccess.OPERATOR


def test_no_route_of_an_engine_is_in_both_lists() -> None:
    assert not set(CLIENTS) & set(OPERATORS)
    assert len(CLIENTS) + len(OPERATORS) > 140


@pytest.mark.parametrize("spelling", SPELLINGS)
@for_each("path", CHANGING)
def test_no_spelling_opens_a_path_of_operators(path: str, spelling: str) -> None:
    coded = "/" + "".join(f"%{ord(c):02x}" for c in path[1:])
    target = spelling.format(
        path, path[1:], upper=path.upper(), coded=coded, twice=coded.replace("%", "%25"),
        thrice=coded.replace("%", "%2525"),
    )  # fmt: skip

    assert read_target(target.encode("latin-1")).access is not TargetAccess.CLIENT


@pytest.mark.parametrize("form", ["/v1/{}", "/v2/{}", "/v1//{}", "/v1/{}/x", "/V1/{}", "/v1/{};x"])
@for_each("name", [route.name for route in (*RESERVED_ROUTES, *RESERVED_PREFIXES)])
def test_what_changes_a_server_is_closed_under_a_version_too(name: str, form: str) -> None:
    found = read_target(form.format(name).encode())

    assert found.access is TargetAccess.OPERATOR
    assert name in found.reason.lower()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (b"http://a/v1/models", "allowed is a path that begins with one '/'"),
        (b"a:443", "allowed is a path"),
        (b"*", "allowed is a path"),
        (b"//v1/models", "begins with one '/'"),
        (b"//", "begins with one '/'"),
        (b"/v1/../sleep", "dot segment"),
        (b"/v1/%2E./sleep", "dot segment"),
        (b"/v1\\sleep", "backslash"),
        (b"/v1/a%0d%0ax", "control character"),
        (b"/v1/%zz", "two hexadecimal digits"),
        (b"/v1/%" + b"25" * MAX_DECODINGS + b"61", f"more than {MAX_DECODINGS} times"),
    ],
)
def test_a_malformed_target_is_refused_in_one_line(target: bytes, text: str) -> None:
    found = read_target(target)

    assert found.access is TargetAccess.REFUSED
    assert text in found.reason
    assert "\n" not in found.reason
    assert found.route is None


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models/Qwen%2FQwen3-0.6B", b"/v1/models/my%20adapter", b"/v1/x.y", b"/v1/.well-known", b"/v1/a..b",
        b"/v1/chat/completions/?a=%zz&b=../..", b"/v1//chat/completions", b"/v1/%25", b"/v1/caf\xc3\xa9", b"/v1",
        b"/v1/", b"/v1/sleepy", b"/v1/models/sleep", b"/v1/files/pause",
    ],
)  # fmt: skip
def test_odd_but_plain_targets_of_clients_pass(target: bytes) -> None:
    assert read_target(target).access is TargetAccess.CLIENT


@pytest.mark.parametrize(
    "target", [b"/v12/x", b"/v1x", b"/xv1/y", b"/v3/x", b"/tokenize/x", b"/rerank2", b"/inference/v1"]
)
def test_what_only_looks_like_a_path_of_clients_is_for_operators(target: bytes) -> None:
    assert read_target(target).access is TargetAccess.OPERATOR


@pytest.mark.parametrize(
    ("target", "collection", "state_id"),
    [
        (b"/v1/responses/resp_aB1", "/v1/responses", "resp_aB1"),
        (b"/v1/responses/resp_aB1/cancel?x", "/v1/responses", "resp_aB1"),
        (b"/V1/responses//resp_aB1/", "/V1/responses", "resp_aB1"),
        (b"/V1/Files/aBc", "/V1/Files", "aBc"),
        (b"/v1/responses", "/v1/responses", None),
        (b"/V1//Files/?x", "/V1/Files", None),
        (b"/v1/responses/render", "", None),
        (b"/v1/files/file-1/content", "/v1/files", "file-1"),
        (b"/v1/batches/batch_1", "/v1/batches", "batch_1"),
        (b"/v1/messages/batches/msgbatch_1/results", "/v1/messages/batches", "msgbatch_1"),
        (b"/v1/messages/count_tokens", "", None),
        (b"/v1/videos/video_1/content", "/v1/videos", "video_1"),
        (b"/v1/videos/generations", "", None),
        (b"/v1/chat/completions/render", "", None),
    ],
)
def test_a_path_names_what_only_one_server_has(target: bytes, collection: str, state_id: str | None) -> None:
    found = read_target(target)

    assert (found.collection, found.state_id) == (collection, state_id)


def test_every_stateful_collection_names_its_ids() -> None:
    for collection in STATEFUL_COLLECTIONS:
        assert read_target(f"{collection}/id_1/x".encode()).state_id == "id_1"


@pytest.mark.parametrize(
    ("target", "has_prompt", "answer", "model_in_path"),
    [
        (b"/v1/chat/completions", True, ApiForm.CHAT, False),
        (b"/v1/completions/", True, ApiForm.CHAT, False),
        (b"/v1/messages?beta=true", True, ApiForm.MESSAGES, False),
        (b"/v1/responses", True, ApiForm.RESPONSES, False),
        (b"/v1/audio/transcriptions", False, None, False),
        (b"/v1/realtime?model=m", False, None, False),
        (b"/v1/models/a/b", False, None, True),
        (b"/v1/unheard_of", False, None, False),
    ],
)
def test_what_is_known_of_a_path(target: bytes, has_prompt: bool, answer: ApiForm | None, model_in_path: bool) -> None:
    route = read_target(target).route

    assert route is not None
    assert (route.has_prompt, route.answer, route.model_in_path) == (has_prompt, answer, model_in_path)


@pytest.mark.parametrize("path", CLIENT_ROUTES)
def test_a_route_of_clients_is_read_as_itself(path: str) -> None:
    found = read_target(path.encode())

    assert (found.access, found.path, found.route) == (TargetAccess.CLIENT, path, CLIENT_ROUTES[path])


@st.composite
def encoded(draw: st.DrawFn, path: str) -> bytes:
    """A spelling that a server reads as that path: letters encoded, slashes repeated at the end."""
    letters = [f"%{ord(c):02X}" if draw(st.booleans()) else c for c in path[1:]]
    ends = ["", "?q"] if path == "/" else ["", "/", "?q", "/?../"]
    return ("/" + "".join(letters) + draw(st.sampled_from(ends))).encode()


@given(data=st.data(), path=st.sampled_from(OPERATORS))
def test_an_encoded_path_of_operators_stays_theirs(data: st.DataObject, path: str) -> None:
    assert read_target(data.draw(encoded(path))).access is TargetAccess.OPERATOR


@given(data=st.data(), path=st.sampled_from(CLIENTS))
def test_an_encoded_path_of_clients_stays_theirs(data: st.DataObject, path: str) -> None:
    assert read_target(data.draw(encoded(path))).access is TargetAccess.CLIENT


@given(st.one_of(st.binary(max_size=40), st.from_regex(rb"/v1[/.;%25ef\\]*(sleep)?", fullmatch=True)))
def test_any_target_is_read_without_an_error(target: bytes) -> None:
    found = read_target(target)

    if found.access is TargetAccess.CLIENT:
        assert found.path.lower().startswith(("/v1", "/v2")) or found.path.lower() in CLIENT_ROUTES
        assert not {".", ".."} & set(found.path.split("/"))
