"""Whose a request is, for every cache: those of this process, and the prefix caches of engines by its salt.

| | found by |
|---|---|
| API keys | requests of the same tenant with the same ``cache_salt`` |
| none | requests with the same ``cache_salt``, from any client; all that send none share |
| none, ``--isolate-tenants`` | requests with the same ``--tenant-header`` and ``cache_salt``; with neither, by none |

With isolation and without keys, this process keeps nothing at all: how many clients there are is not known, so there is
no dividing a budget among them by which none could push out what another keeps. Engines still find blocks by the salt.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from poolgrid.frontend.access.key_file import SALT_BYTES, cache_salt
from poolgrid.frontend.access.tenants import Caller
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.inference.inference_request import EVERYBODY, WHOLE, CacheDomain

Headers = Iterable[tuple[bytes, bytes]]


class CacheDomains:
    """Tells the requests of one server apart."""

    def __init__(self, isolate: bool, tenant_header: str = "") -> None:
        self._isolate = isolate
        self._header = tenant_header.lower().encode("latin-1")

    def claim(self, job: PreparedRequest, caller: Caller | None, headers: Headers) -> None:
        """Say in ``job`` whose it is; ``caller`` is the tenant that its API key named."""
        if caller is not None:
            job.domain = caller.cache_domain(job.client_salt)
        elif not self._isolate:
            salt = job.client_salt
            job.domain = CacheDomain("", salt, WHOLE) if salt else EVERYBODY
        else:
            job.own_salt = self._salt(headers, job.client_salt)

    def _salt(self, headers: Headers, client_salt: str) -> str:
        """Return a salt that only requests of the same client have.

        What a client writes is hashed together with its header's value, so that it cannot write another's salt.
        """
        tenant = next((value for name, value in headers if name == self._header), b"").decode("latin-1")
        if not tenant and not client_salt:
            return secrets.token_hex(SALT_BYTES)
        return cache_salt(b"", tenant, client_salt)
