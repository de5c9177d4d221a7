"""Who has a name now, as a fold of what was seen, with time as an argument."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.wire.addresses import EndpointName, parse_name
from poolgrid.kernel.wire.registration import (
    ENTRY_BYTES_MAX,
    RegistrationRefused,
    decode_registration,
    encode_registration,
)
from poolgrid.server.discovery import registry as module
from poolgrid.server.discovery.registry import Registry, Seen
from tests.discovery.registrations import registration, seen

SELECT = parse_name("dyn://blue.router.select")


def test_what_is_seen_is_found_by_its_name_the_latest_life_first() -> None:
    registry = Registry()

    assert registry.look([seen(1), seen(2), seen(3, component="worker")], 0)

    assert registry.addresses(SELECT) == ["tcp://10.0.0.2:9000", "tcp://10.0.0.1:9000"]
    assert [each.instance for each in registry.instances("blue")] == ["router-1", "router-2", "router-3"]
    assert registry.addresses(EndpointName("green", "router", "select")) == []
    assert not registry.look([seen(1), seen(2), seen(3, component="worker")], 1)


def test_who_is_not_seen_any_more_is_gone_at_once() -> None:
    registry = Registry()
    registry.look([seen(1), seen(2)], 0)

    assert registry.look([seen(2)], 1)

    assert registry.addresses(SELECT) == ["tcp://10.0.0.2:9000"]


def test_a_lease_ends_when_its_mark_does_not_change_and_begins_anew_when_it_does() -> None:
    registry = Registry()
    registry.look([seen(1, mark=1), seen(2, mark=1)], 0)

    registry.look([seen(1, mark=1), seen(2, mark=2)], 9_000)
    registry.look([seen(1, mark=1), seen(2, mark=2)], 10_000)

    assert registry.addresses(SELECT) == ["tcp://10.0.0.2:9000"]
    assert registry.look([seen(1, mark=2), seen(2, mark=2)], 11_000)
    assert len(registry.addresses(SELECT)) == 2


def test_what_a_killed_process_left_behind_is_not_believed_by_who_comes_later() -> None:
    registry = Registry()

    registry.look([seen(1, age_ms=60_000), seen(2, age_ms=-60_000)], 0)

    assert registry.addresses(SELECT) == ["tcp://10.0.0.2:9000"], "a clock that stands behind ends nobody"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoints": {"select": "tcp://0.0.0.0:1"}}, ["endpoints.select", "'tcp://0.0.0.0:1'"]),
        ({"endpoints": {"select": "ipc:///tmp/x"}}, ["endpoints.select", "'ipc:///tmp/x'"]),
        ({"endpoints": {"http": "http://user:key@host"}}, ["endpoints.http", "user name"]),
        ({"endpoints": {"a b": "tcp://h:1"}}, ["endpoints has 'a b'"]),
        ({"endpoints": {"select": "tcp://h:1" + "0" * 300}}, ["endpoints.select", "309 characters"]),
        ({"endpoints": {str(each): "tcp://h:1" for each in range(17)}}, ["$.endpoints", "16"]),
        ({"endpoints": ["tcp://h:1"]}, ["$.endpoints"]),
        ({"lease_ms": 10**9}, ["$.lease_ms"]),
        ({"lease_ms": 0}, ["$.lease_ms"]),
        ({"life": "zz"}, ["life", "'zz'"]),
        ({"namespace": "../etc"}, ["namespace", "'../etc'"]),
        ({"component": "-router"}, ["component", "'-router'"]),
        ({"instance": "a\nb"}, ["instance", "'a\\nb'"]),
        ({"instance": ""}, ["instance"]),
        ({"namespace": "green"}, ["green.router", "its own namespace"]),
    ],
)
def test_a_wrong_registration_is_refused_with_its_field_and_value_and_keeps_nobody_out(
    change: dict[str, Any], words: list[str]
) -> None:
    registry = Registry()
    good, bad = seen(1), seen(2)
    bad = bad._replace(data=json.dumps({**json.loads(bad.data), **change}).encode())

    registry.look([bad, good], 0)

    assert registry.addresses(SELECT) == ["tcp://10.0.0.1:9000"]
    [why] = registry.refused.values()
    assert bad.key in why
    for word in words:
        assert word in why


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 5000, b"{}", b'"x"', b" " * (ENTRY_BYTES_MAX + 1)])
def test_what_is_no_registration_is_refused(data: bytes) -> None:
    registry = Registry()

    registry.look([Seen("blue.router.0", data), seen(1)], 0)

    assert len(registry.instances()) == 1
    assert registry.refused_count == 1


@given(st.binary(max_size=200), st.text(max_size=100))
def test_no_entry_whatever_raises_anything_but_a_refusal(data: bytes, key: str) -> None:
    with pytest.raises(RegistrationRefused):
        decode_registration(key, data)


def test_who_comes_last_is_left_out_where_there_are_too_many_and_another_component_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INSTANCES_MAX", 2)
    registry = Registry()
    registry.look([seen(5)], 0)

    registry.look([seen(1), seen(2), seen(3), seen(5), seen(6, component="worker")], 1)

    assert [each.instance for each in registry.instances()] == ["router-1", "router-5", "router-6"]
    assert registry.refused_count == 2


def test_what_we_write_we_read_and_what_nobody_could_read_is_not_written() -> None:
    made = registration(1)

    assert decode_registration(made.key, encode_registration(made)) == made
    with pytest.raises(RegistrationRefused, match=r"endpoints\.http"):
        encode_registration(registration(1, endpoints={"http": "http://0.0.0.0:1"}))


@pytest.mark.parametrize(
    "address", ["dyn://a.b", "dyn://a.b.c.d", "dyn://a..c", "dyn://a.b.c/d", "a.b.c", "dyn://ä.b.c"]
)
def test_what_is_no_name_is_refused_and_named(address: str) -> None:
    with pytest.raises(ValueError, match="dyn://"):
        parse_name(address)
