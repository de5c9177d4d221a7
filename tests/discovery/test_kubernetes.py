"""Names on Kubernetes, against an API server that does what the real one may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from pydantic import ValidationError

from poolgrid.plugins.kubernetes import registrations as kubernetes
from poolgrid.plugins.kubernetes.api_reader import api_server
from poolgrid.plugins.kubernetes.registrations import KubernetesRegistrations
from poolgrid.server.discovery.discovery import Discovery
from poolgrid.server.discovery.registry import DiscoveryUnavailable, Scope
from poolgrid.server.global_router.settings import GlobalRouterSettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.settings import RouterSettings
from tests.clock import HandClock
from tests.discovery.api_server import ApiServer
from tests.discovery.slices import endpoint, endpoint_slice
from tests.discovery.waiting import until, until_found

ROUTERS = [Scope("blue", "router")]


@asynccontextmanager
async def reading(server: ApiServer, clock: HandClock | None = None) -> AsyncIterator[KubernetesRegistrations]:
    await server.start()
    names = server.names(clock)
    try:
        await names.open()
        yield names
    finally:
        await names.close()
        await server.stop()


async def unavailable(names: KubernetesRegistrations, cause: str | None = None) -> None:
    with pytest.raises(DiscoveryUnavailable, match=cause):
        await names.look(ROUTERS)


async def test_who_is_ready_is_found_and_who_ends_is_gone_while_nothing_is_written(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    server.slices = [endpoint_slice(endpoints=[endpoint(1)])]
    async with reading(server) as store:
        store.look_s = 0.05
        names = Discovery(store, "blue", 10, SystemClock())
        names.follow(ROUTERS[0], lambda: None)
        await names.register("router", "r", {"http": "http://0.0.0.0:1"})

        assert await until_found(names, 1) == ["http://10.1.0.1:8000"]
        [row] = (await names.fleet()).data
        assert (row.instance, row.started_ms) == ("router-1", 0)
        server.slices = [endpoint_slice(endpoints=[])]
        await until_found(names, 0)
        await names.close()


async def test_a_look_asks_for_what_is_in_memory_by_label_and_takes_a_list_that_ignores_the_limit(
    tmp_path: Path,
) -> None:
    server = ApiServer(tmp_path)
    server.slices = [
        endpoint_slice("a-aaaaa", [endpoint(1)]),
        endpoint_slice("b-aaaaa", [endpoint(2)], component="worker"),
        endpoint_slice("c-aaaaa", [endpoint(3)], namespace="green"),
    ]
    server.page = 1
    async with reading(server) as names:
        assert len(await names.look(ROUTERS)) == 1
        assert len(await names.look([Scope(component="router")])) == 2
        assert len(await names.look([Scope()])) == 3

    assert [each["labelSelector"] for each in server.asked] == [
        "poolgrid/namespace=blue,poolgrid/component=router",
        "poolgrid/namespace,poolgrid/component=router",
        "poolgrid/namespace,poolgrid/component",
    ]
    assert all(each["resourceVersion"] == "0" and int(each["limit"]) > 0 for each in server.asked)


async def test_pages_are_all_read_and_a_list_too_old_to_go_on_with_is_begun_again(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    server.slices = [endpoint_slice(f"a-{number:05}", [endpoint(number)]) for number in range(7)]
    server.from_memory, server.page = False, 2
    async with reading(server) as names:
        assert len(await names.look(ROUTERS)) == 7
        server.changes_between_pages = 1
        assert len(await names.look(ROUTERS)) == 7
        server.changes_between_pages = 100
        await unavailable(names, "too old between its pages, 3 times")


async def test_a_list_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "SLICES_MAX", 3)

    server = ApiServer(tmp_path)
    server.slices = [endpoint_slice(f"a-{number:05}", [endpoint(number)]) for number in range(7)]
    server.from_memory, server.page = False, 2
    async with reading(server) as names:
        await unavailable(names, "more than 3 endpointslices")
    assert len(server.asked) == 2


async def test_a_token_that_has_ended_is_read_again_at_once_and_a_new_authority_after_a_failure(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    server.slices = [endpoint_slice(endpoints=[endpoint(1)])]
    async with reading(server) as names:
        await names.look(ROUTERS)
        server.renew("second")
        assert len(await names.look(ROUTERS)) == 1

        server.renew("third", told=False)
        await unavailable(names, r"status 401: Unauthorized\. The token in .*account is not")
        server.tell()
        assert len(await names.look(ROUTERS)) == 1

        await server.stop()
        other = trustme.CA(key_type=trustme.KeyType.ECDSA)
        await server.start(other, int(server.url.rpartition(":")[2]))
        await unavailable(names, "certificate")
        server.tell(other)
        await unavailable(names)
        assert len(await names.look(ROUTERS)) == 1


async def test_a_token_is_read_again_every_minute_and_one_that_is_amid_its_renewal_stays(tmp_path: Path) -> None:
    clock, server = HandClock(), ApiServer(tmp_path)
    async with reading(server, clock) as names:
        server.tell()
        (server.account / "token").unlink()
        clock.now_ms += 60_000
        await names.look(ROUTERS)
        server.renew("second")
        clock.now_ms += 60_000
        await names.look(ROUTERS)
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("code", "headers", "alone_s"), [(429, {"Retry-After": "7"}, 7), (503, {}, 5), (429, {"Retry-After": "900"}, 60)]
)
async def test_a_server_that_is_asked_too_much_is_left_alone(
    tmp_path: Path, code: int, headers: dict[str, str], alone_s: int
) -> None:
    clock, server = HandClock(), ApiServer(tmp_path)
    async with reading(server, clock) as names:
        server.refusals = [(code, headers)]
        await unavailable(names, f"status {code}: too many requests")
        clock.now_ms += 1000 * alone_s - 1
        await unavailable(names, "left alone")
        assert not server.asked

        clock.now_ms += 1
        await names.look(ROUTERS)

        assert len(server.asked) == 1


async def test_what_no_role_allows_is_said_and_everybody_keeps_the_name_they_have(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    server.slices = [endpoint_slice(endpoints=[endpoint(1)])]
    async with reading(server) as store:
        store.look_s = 0.05
        names = Discovery(store, "blue", 10, SystemClock())
        names.follow(ROUTERS[0], lambda: None)
        await until_found(names, 1)

        server.namespace = "elsewhere"
        await until(lambda: bool(names.trouble))

        assert "status 403: endpointslices.discovery.k8s.io is forbidden" in names.trouble
        assert "A Role has to allow" in names.trouble
        assert len(await until_found(names, 1)) == 1
        await names.close()


def test_who_is_in_no_pod_and_has_no_account_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="in no pod"):
        api_server()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert api_server() == "https://[fd00::1]:443"
    with pytest.raises(OSError, match="token"):
        asyncio.run(KubernetesRegistrations(api_server(), tmp_path, (), SystemClock(), 0.5).open())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kubernetes_api": "https://h:1"}, "goes with names kubernetes"),
        ({"names": "kubernetes", "kubernetes_api": "http://10.0.0.1:8001"}, "kubernetes_api is 'http://10.0.0.1:8001'"),
        ({"names": "kubernetes", "kubernetes_api": "http://127.0.0.1:8001"}, "kubernetes_namespace is not given"),
        ({"names": "kubernetes", "kubernetes_namespace": ["Blue"]}, "kubernetes_namespace"),
        ({"names": "kubernetes", "names_dir": "x"}, "names_dir"),
    ],
)
def test_settings_that_would_read_nothing_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GlobalRouterSettings.model_validate({"config": "x", **fields})


def test_who_only_reads_may_listen_on_all_addresses_without_saying_which_is_its_own() -> None:
    assert RouterSettings.model_validate({"names": "kubernetes", "host": "0.0.0.0"}).advertise_host == ""
