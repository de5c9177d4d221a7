"""HTTP over TLS: with the server's certificate, new ones as they come, and clients' own where they are asked for."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from prometheus_client import CollectorRegistry

from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.transport.security import SecuritySettings, Tls, TlsError, client_context, expires_at_s
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


class Files:
    """A certificate of an authority, where a server looks for it."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.certificate = directory / "server.pem"
        self.key = directory / "server.key"
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue()

    def issue(self) -> None:
        issued = self.authority.issue_cert("127.0.0.1")
        for path, blobs in ((self.key, [issued.private_key_pem]), (self.certificate, issued.cert_chain_pems)):
            replacement = path.with_suffix(".new")
            replacement.write_bytes(b"".join(blob.bytes() for blob in blobs))
            os.replace(replacement, path)

    def settings(self, **more: Path) -> SecuritySettings:
        return SecuritySettings.model_validate({"tls_certificate": self.certificate, "tls_key": self.key, **more})

    def trusting(self) -> ssl.SSLContext:
        return client_context(self.ca, None)


@asynccontextmanager
async def serving(tls: Tls | None) -> AsyncIterator[HttpServer]:
    server = HttpServer(application(FakeBackend()), "127.0.0.1", 0, "port", tls=tls)
    server.start()
    try:
        yield server
    finally:
        await server.stop()


async def chat(server: HttpServer, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(base_url=server.url, verify=context, trust_env=False, timeout=30) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        return answer.status_code


async def shown_certificate(server: HttpServer, context: ssl.SSLContext) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context, server_hostname="127.0.0.1")
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(shown, bytes)
        return shown
    finally:
        writer.close()


def loaded(settings: SecuritySettings, registry: CollectorRegistry | None = None) -> Tls:
    tls = Tls.load(settings, registry or CollectorRegistry())
    assert tls is not None
    return tls


async def test_requests_and_streams_go_over_tls_and_plain_ones_do_no_harm(tmp_path: Path) -> None:
    files = Files(tmp_path)
    async with serving(loaded(files.settings())) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert await chat(server, files.trusting()) == 200
        async with httpx.AsyncClient(trust_env=False, timeout=30) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{server.port}/live")
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await chat(server, client_context(None, None))
        assert await chat(server, files.trusting()) == 200


async def test_a_new_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    files = Files(tmp_path)
    registry = CollectorRegistry()
    tls = loaded(files.settings(), registry)
    async with serving(tls) as server:
        first = await shown_certificate(server, files.trusting())
        assert not tls.check(), "nothing has changed"
        files.issue()
        assert tls.check()
        second = await shown_certificate(server, files.trusting())
        assert second != first

        expiry = registry.get_sample_value(
            "poolgrid_http_certificate_expiry_timestamp_seconds", {"file": files.certificate.name}
        )
        assert expiry == expires_at_s(files.certificate)

        files.key.write_text("half a renewal")
        assert not tls.check()
        assert registry.get_sample_value("poolgrid_http_certificate_stale") == 1
        assert await shown_certificate(server, files.trusting()) == second
        files.certificate.unlink()
        assert not tls.check()
        assert await chat(server, files.trusting()) == 200
        files.issue()
        assert tls.check()
        assert registry.get_sample_value("poolgrid_http_certificate_stale") == 0


async def test_clients_without_a_certificate_stay_outside_when_it_is_asked_for(tmp_path: Path) -> None:
    files = Files(tmp_path)
    (tmp_path / "client").mkdir()
    client = Files(tmp_path / "client")
    async with serving(loaded(files.settings(tls_client_ca=client.ca))) as server:
        known = client_context(files.ca, (client.certificate, client.key))
        stranger = client_context(files.ca, (files.certificate, files.key))
        assert await chat(server, known) == 200
        for context in (files.trusting(), stranger):
            with pytest.raises(httpx.TransportError):
                await chat(server, context)
        assert await chat(server, known) == 200


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Files(tmp_path)
    (tmp_path / "junk").write_text("junk")
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other")
    for settings, words in (
        (files.settings(tls_key=tmp_path / "none"), "none: No such file"),
        (files.settings(tls_certificate=tmp_path / "junk"), "junk"),
        (files.settings(tls_key=other.key), "KEY_VALUES_MISMATCH"),
        (files.settings(tls_client_ca=tmp_path / "junk"), "tls_client_ca"),
    ):
        with pytest.raises(TlsError, match=words):
            Tls.load(settings, CollectorRegistry())
    with pytest.raises(TlsError):
        client_context(tmp_path / "junk", None)
    assert Tls.load(SecuritySettings(), CollectorRegistry()) is None


@pytest.mark.parametrize(
    "not_after",
    [
        datetime(2035, 6, 1, 12, 30, 59, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),  # the last that has two digits of its year
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(2999, 1, 1, tzinfo=UTC),
    ],
)
def test_the_end_of_a_certificate_is_read(tmp_path: Path, not_after: datetime) -> None:
    path = tmp_path / "certificate.pem"
    issued = trustme.CA().issue_cert("example.org", not_after=not_after)
    path.write_bytes(b"some words before\n" + b"".join(blob.bytes() for blob in issued.cert_chain_pems))

    assert expires_at_s(path) == not_after.timestamp()
    assert x509.load_pem_x509_certificate(path.read_bytes()[18:]).not_valid_after_utc == not_after


def test_one_that_has_ended_says_so(tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    ended = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    path.write_bytes(trustme.CA().issue_cert("example.org", not_after=ended).cert_chain_pems[0].bytes())

    assert expires_at_s(path) == ended.timestamp()


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----", "\x00\xff"]
)
def test_a_file_that_has_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "certificate.pem"
    path.write_text(text, encoding="latin-1")

    with pytest.raises((OSError, ValueError)):
        expires_at_s(path)
