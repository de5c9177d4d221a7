"""A NATS server that is closed: certificates on both sides, and a user with a key."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.nats_settings import EventPlaneSettings
from tests.nats.servers import BINARY, MISSING, NatsServer

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not BINARY, reason=MISSING)]


def test_a_process_with_certificate_and_key_gets_in_and_one_without_does_not(tmp_path: Path) -> None:
    import nkeys
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "poolgrid")):
        certificate = authority.issue_cert(identity)
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(seed)
    public = nkeys.from_seed(seed).public_key.decode()
    files = f'cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key", ca_file: "{tmp_path}/ca.pem"'
    more = f"tls {{ {files}, verify: true }}\nauthorization {{ users: [ {{ nkey: {public} }} ] }}\n"
    server = NatsServer(tmp_path, "closed", more)
    try:
        server.start()
        url = (f"tls://127.0.0.1:{server.port}",)
        known = EventPlaneSettings(
            event_plane="nats",
            nats_url=url,
            nats_credentials=tmp_path / "user.nk",
            nats_tls_ca=tmp_path / "ca.pem",
            nats_tls_certificate=tmp_path / "client.pem",
            nats_tls_key=tmp_path / "client.key",
        )
        stranger = EventPlaneSettings(event_plane="nats", nats_url=url, nats_tls_ca=tmp_path / "ca.pem")

        asyncio.run(opened(known))
        with pytest.raises(TimeoutError):
            asyncio.run(opened(stranger, timeout_s=1.0))
    finally:
        server.kill()


async def opened(settings: EventPlaneSettings, timeout_s: float = 60.0) -> None:
    """Connect and ask something."""
    connection = NatsConnection(settings, "test", SystemClock())
    try:
        async with asyncio.timeout(timeout_s):
            await connection.open()
        assert (await connection.jetstream.account_info()).streams == 0
    finally:
        await connection.close()
