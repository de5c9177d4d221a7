"""Settings that close a process's sockets, the same for every process, and what is said when they are left open.

TLS of an HTTP server: its certificate, whom it lets in, and new files without a restart.

The certificate and its key are looked at every ``CHECK_INTERVAL_S``. Changed ones are tried first, then used for every
new connection; files that do not fit together change nothing, are logged as an error, and are tried again when they
change again (a certificate is often replaced a moment before its key). Connections that stand keep what they began
with. Authorities of clients are read at the start only: a context can take more of them, but never forget one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from math import nan
from pathlib import Path
from typing import ClassVar, Self

from prometheus_client import CollectorRegistry
from pydantic import Field, model_validator

from poolgrid.server.process.instruments import Gauge
from poolgrid.server.process.settings import InputFile, Settings


class SecuritySettings(Settings):
    """TLS for HTTP and CURVE for the ZMQ planes."""

    panel: ClassVar[str] = "TLS and CURVE"

    tls_certificate: InputFile | None = Field(
        None,
        description=("Serve HTTPS with the certificate chain in this PEM file; needs tls_key. Unset = plain HTTP."),
    )
    tls_key: InputFile | None = Field(None, description=("Read the private key of tls_certificate from this PEM file."))
    tls_client_ca: InputFile | None = Field(
        None,
        description=("Require client certificates from the authorities in this PEM file (mTLS)."),
    )
    curve_key: InputFile | None = Field(
        None,
        description=(
            "Encrypt every ZMQ connection with this CURVE secret key file (poolgrid keys curve). Unset = no encryption."
        ),
    )
    curve_server_key: InputFile | None = Field(
        None,
        description=(
            "Read the public key of the servers that this process connects to from this file. Unset = this "
            "process's own key."
        ),
    )
    curve_allowed_keys: Path | None = Field(
        None,
        description=(
            "Allow peers whose public key files (*.key) are in this directory. Unset = only this process's "
            "own key. Changes apply to new connections."
        ),
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: give both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.curve_key is None and (self.curve_server_key is not None or self.curve_allowed_keys is not None):
            raise ValueError("curve_server_key and curve_allowed_keys need curve_key")
        return self

    def tls_pair(self) -> tuple[Path, Path] | None:
        """Return the files of the certificate and its key, if there are any."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return self.tls_certificate, self.tls_key

    def exposures(self, host: str, http: bool, planes: str, keyed: bool = True) -> list[str]:
        """Return warnings for the start about sockets at ``host`` that any host of the network can use.

        ``http``: there is an HTTP server; ``planes``: the ZMQ planes, in words (empty = none); ``keyed``: HTTP asks for
        API keys, or shows nothing that needs one.
        """
        if is_loopback(host):
            return []
        warnings = []
        if planes and self.curve_key is None:
            warnings.append(
                f"{planes} at {host}: open to every client that can connect, and unencrypted; set --curve-key"
            )
        if http and self.tls_certificate is None:
            warnings.append(f"HTTP at {host} is unencrypted; set --tls-certificate and --tls-key, or put TLS in front")
        if http and not keyed and self.tls_client_ca is None:
            warnings.append(f"HTTP at {host} is open to every client that can connect; set --api-keys")
        return warnings


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


log = logging.getLogger(__name__)


def expires_at_s(certificate: Path) -> float:
    """Return the Unix time after which the first certificate of a PEM file is not valid any more.

    Raises ``OSError`` (``ssl.SSLError`` is one), and ``ValueError``, when there is none in it that can be read.
    """
    # Python's own tests read certificates so; its public calls show only those of peers.
    fields = ssl._ssl._test_decode_cert(certificate)  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(fields["notAfter"])


CHECK_INTERVAL_S = 1.0
"""A certificate is replaced hours before it expires; a second is soon enough, and three ``stat`` calls cost nothing."""

Signature = tuple[tuple[int, int, int], ...]


class TlsError(ValueError):
    """A certificate, a key or the authorities of clients cannot be used."""


class Tls:
    """The TLS of one server."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Read the files; raises ``TlsError``."""
        self._certificate = certificate
        self._key = key
        self.stale = False
        """Whether the files have changed to something that cannot be used."""
        self._seen = self._signature()
        self.context = _context(certificate, key)
        """What the server uses; it is changed in place."""
        self.expires_s = _expiry(certificate)
        """Unix time after which what is in use is not valid; NaN when that cannot be read."""
        if client_ca is not None:
            try:
                self.context.load_verify_locations(cafile=client_ca)
            except (OSError, ssl.SSLError) as error:
                raise TlsError(f"reading tls_client_ca: {client_ca}: {_why(error)}") from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    @classmethod
    def load(cls, settings: SecuritySettings, registry: CollectorRegistry) -> Tls | None:
        """Return what the settings name; ``None`` without a certificate. Raises ``TlsError``."""
        stale = Gauge(
            "poolgrid_http_certificate_stale",
            "1 while the certificate files cannot be used and an older certificate is in use. Fix the files "
            "before it expires.",
            registry=registry,
        )
        expiry = Gauge(
            "poolgrid_http_certificate_expiry_timestamp_seconds",
            "Unix time at which the HTTP server's certificate expires, by file. Without TLS there is no "
            "series. Replace the files in time; they are read while the process runs.",
            ["file"],
            registry=registry,
        )
        if settings.tls_certificate is None or settings.tls_key is None:
            return None
        tls = cls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        stale.set_function(lambda: float(tls.stale))
        expiry.labels(settings.tls_certificate.name).set_function(lambda: tls.expires_s)
        return tls

    async def watch(self) -> None:
        """Use new files when they change; runs until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()

    def check(self) -> bool:
        """Look at the files; return whether new ones are in use now."""
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            # First elsewhere: half a change must not reach the context that serves.
            _context(self._certificate, self._key)
            self.context.load_cert_chain(self._certificate, self._key)
        except (TlsError, OSError, ssl.SSLError) as error:
            self.stale = True
            log.error("reading a new certificate: %s. The previous one stays in use: correct the files", error)
            return False
        self.stale = False
        self.expires_s = _expiry(self._certificate)
        log.info("a new certificate from %s is in use", self._certificate)
        return True

    def _signature(self) -> Signature | None:
        try:
            stats = [path.stat() for path in (self._certificate, self._key)]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def _expiry(certificate: Path) -> float:
    try:
        return expires_at_s(certificate)
    except (OSError, ValueError) as error:
        log.warning("reading until when %s is valid: %s; its metric has no value", certificate, error)
        return nan


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"reading tls_certificate {certificate} and tls_key {key}: {_why(error)}") from error
    return context


def client_context(authorities: Path | None, own: tuple[Path, Path] | None) -> ssl.SSLContext:
    """Return what a client of ours trusts (the machine's authorities, or those of a file) and shows of itself.

    Raises ``TlsError``.
    """
    try:
        context = ssl.create_default_context(cafile=authorities)
        if own is not None:
            context.load_cert_chain(*own)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"reading authorities and certificate for connections to pools: {_why(error)}") from error
    return context


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
