"""Until when a certificate is valid: the one fact of it that Python's ``ssl`` tells of a peer's only, not of one's own.

A certificate is DER: values in each other, each with a tag, a length and its bytes (X.690). Wanted is the second time
of ``validity`` in ``tbsCertificate`` (RFC 5280, 4.1); what stands before it is stepped over.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

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
