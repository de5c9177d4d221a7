"""TLS of an HTTP server: its certificate, whom it lets in, and new files without a restart.

The certificate and its key are looked at every ``CHECK_INTERVAL_S``. Changed ones are tried first, then used for every
new connection; files that do not fit together change nothing, are logged as an error, and are tried again when they
change again (a certificate is often replaced a moment before its key). Connections that stand keep what they began
with. Authorities of clients are read at the start only: a context can take more of them, but never forget one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from datetime import UTC, datetime
from math import nan
from pathlib import Path

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Gauge
from poolgrid.transport.security import SecuritySettings

log = logging.getLogger(__name__)

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def expires_at_s(certificate: Path) -> float:
    """Return the Unix time after which the first certificate of a PEM file is not valid any more.

    Raises ``OSError``, and ``ValueError`` when there is no certificate in it that can be read.
    """
    text = certificate.read_text(encoding="ascii", errors="replace")
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError(f"reading until when {certificate} is valid: it has no certificate in PEM form")
    try:
        return _not_after(ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)]))
    except (IndexError, ValueError) as error:
        raise ValueError(f"reading until when {certificate} is valid: {error}") from error


def _not_after(der: bytes) -> float:
    fields = _value(_value(der, 0, _SEQUENCE), 0, _SEQUENCE)
    place = 0
    if fields[0] == _VERSION:
        place = _end(fields, place)
    for _ in range(3):  # serial number, signature algorithm, issuer
        place = _end(fields, place)
    validity = _value(fields, place, _SEQUENCE)
    place = _end(validity, 0)
    tag = validity[place]
    text = _value(validity, place, tag).decode("ascii")
    if tag == _GENERALIZED_TIME:
        moment = datetime.strptime(text, "%Y%m%d%H%M%SZ")
    elif tag == _UTC_TIME:
        # Two digits of a year: from 50 on the last century's.
        moment = datetime.strptime(f"{'19' if text[:2] >= '50' else '20'}{text}", "%Y%m%d%H%M%SZ")
    else:
        raise ValueError(
            f"the end of its validity has tag {tag:#x}, allowed are {_UTC_TIME:#x}, {_GENERALIZED_TIME:#x}"
        )
    return moment.replace(tzinfo=UTC).timestamp()


def _header(data: bytes, place: int) -> tuple[int, int]:
    """Return where the bytes of a value begin, and where they end."""
    length, begin = data[place + 1], place + 2
    if length >= 0x80:
        count = length & 0x7F
        length = int.from_bytes(data[begin : begin + count])
        begin += count
    return begin, begin + length


def _end(data: bytes, place: int) -> int:
    return _header(data, place)[1]


def _value(data: bytes, place: int, tag: int) -> bytes:
    if data[place] != tag:
        raise ValueError(f"found tag {data[place]:#x} where {tag:#x} should be")
    begin, end = _header(data, place)
    return data[begin:end]


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
            log.error("reading a new certificate: %s. The one before stays in use: mend the files", error)
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
        log.warning("%s; its metric says nothing", error)
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
