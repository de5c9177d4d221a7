"""Until when a certificate is valid, against what the library that made it says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from poolgrid.transport.security import expires_at_s


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
