"""The tenants of a router process: whose key it is, what they may ask, what they have used.

Rules
    1. A request is judged in this order: key (401), path (403), requests in flight and request rate (429), then model
       and features (403), then token rate (429). The first refusal ends it; what it took before is given back, except
       its place in the request rate.
    2. Prompt tokens are taken when a request is admitted, each prompt once; output tokens when the answer ends. A
       request that never reached a worker gets its prompt tokens back.
    3. Caches are divided among the tenants of the document, active or not. A document with other tenants
       than the last begins with empty caches.
    4. A new document replaces keys and limits at once. What tenants have in flight and have used still counts; a
       tenant that is gone is forgotten when its last request ends. Requests in flight keep the rules they began with.
    5. Limits hold for one process; processes that share a port allow an equal part of them each. Several routers of a
       pool each allow the whole of them.

Nothing here waits or knows of HTTP; times are arguments.

Keeps the tenants of a process equal to their file, without a restart.

The file is looked at (``stat``) at most every ``CHECK_MS``, by each caller that asks for the tenants: requests, probes
and scrapes all do. A changed file is read and put in force in one go. One that cannot be read or used changes nothing:
the old one stays, an error is logged, ``outcome="refused"`` is counted, and ``stale`` is true until a good one is
there.

Whose a request is, for every cache: those of this process, and the prefix caches of engines by its salt.

| | found by |
|---|---|
| API keys | requests of the same tenant with the same ``cache_salt`` |
| none | requests with the same ``cache_salt``, from any client; all that send none share |
| none, ``--isolate-tenants`` | requests with the same ``--tenant-header`` and ``cache_salt``; with neither, by none |

With isolation and without keys, this process keeps nothing at all: how many clients there are is not known, so there is
no dividing a budget among them by which none could push out what another keeps. Engines still find blocks by the salt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from poolgrid.kernel.requests.inference import EVERYBODY, WHOLE, CacheDomain, CacheShares, InferenceRequest, Refused
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import (
    FEATURES,
    HASH_PREFIX,
    SALT_BYTES,
    Key,
    KeyDocument,
    KeyFileError,
    Tenant,
    cache_salt,
)
from poolgrid.server.frontend.access.meter import Meter, Standing
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.process.clock import Clock

INDEX_BYTES = 8
"""Leading bytes of a key's hash by which it is looked up. Equal ones are distinguished by comparing the whole."""

CONCURRENCY_RETRY_S = 1.0
"""It is unknown when one of a tenant's own requests ends; a second is a polite time to ask again."""


class KnownKey(NamedTuple):
    """A key and whose it is."""

    digest: bytes
    key: Key
    tenant: str


@dataclasses.dataclass(slots=True, eq=False)
class TenantAccount:
    """What one tenant may do and has used."""

    name: str
    tenant: Tenant
    secret: bytes
    meter: Meter
    cache_shares: CacheShares
    """Among how many tenants caches are divided."""

    def use(self, tenant: Tenant, secret: bytes, cache_shares: CacheShares) -> None:
        """Go by new rules from now on."""
        self.tenant = tenant
        self.secret = secret
        self.cache_shares = cache_shares


class Tenants:
    """All accounts, and the keys that lead to them."""

    def __init__(self, document: KeyDocument) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._leaving: dict[str, TenantAccount] = {}
        """Tenants that are in the document no more, and were asked something when they went."""
        self._keys: dict[bytes, list[KnownKey]] = {}
        self._cache_shares = WHOLE
        self.use(document)

    @property
    def accounts(self) -> dict[str, TenantAccount]:
        return self._accounts

    def use(self, document: KeyDocument) -> None:
        """Go by a new document from now on."""
        secret = bytes.fromhex(document.salt_secret)
        known = {**self._leaving, **self._accounts}
        if document.tenants.keys() != self._accounts.keys():
            self._cache_shares = CacheShares(max(1, len(document.tenants)), self._cache_shares.edition + 1)
        shares = self._cache_shares
        accounts: dict[str, TenantAccount] = {}
        keys: dict[bytes, list[KnownKey]] = {}
        for name, tenant in document.tenants.items():
            account = known.pop(name, None) or TenantAccount(name, tenant, secret, Meter(), shares)
            account.use(tenant, secret, shares)
            accounts[name] = account
            for key in tenant.keys:
                digest = bytes.fromhex(key.hash.removeprefix(HASH_PREFIX))
                keys.setdefault(digest[:INDEX_BYTES], []).append(KnownKey(digest, key, name))
        self._accounts, self._keys = accounts, keys
        self._leaving = {name: account for name, account in known.items() if account.meter.in_flight}

    def authenticate(self, key: bytes | None, wall_ms: float) -> TenantAccount:
        """Return the account that a key leads to; raises ``Refused`` (401)."""
        if not key:
            raise Refused(
                401,
                "missing_api_key",
                "no API key was sent; send one as 'authorization: Bearer KEY' or 'x-api-key: KEY'",
            )
        digest = hashlib.sha256(key).digest()
        # The lookup is by a hash that no client can steer; the whole is compared in constant time.
        for known in self._keys.get(digest[:INDEX_BYTES], ()):
            if hmac.compare_digest(known.digest, digest):
                if known.key.expires is not None and known.key.expires.timestamp() * 1000 <= wall_ms:
                    raise Refused(
                        401, "expired_api_key", f"API key {known.key.id} expired at {known.key.expires.isoformat()}"
                    )
                return self._accounts[known.tenant]
        raise Refused(401, "invalid_api_key", "the API key is not known here")


class Caller:
    """One HTTP request of a tenant, from the check of its key to its end."""

    __slots__ = ("_output_tokens", "_prompt_tokens", "_rules", "_secret", "account")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self._rules = account.tenant
        self._secret = account.secret
        self._prompt_tokens = 0
        self._output_tokens = 0

    @property
    def tenant(self) -> str:
        """Return the tenant's name."""
        return self.account.name

    @property
    def is_operator(self) -> bool:
        """Return whether the tenant may see and change the router."""
        return self._rules.operator

    def cache_domain(self, client_salt: str) -> CacheDomain:
        """Return who may find what the request leaves in caches."""
        return CacheDomain(self.tenant, client_salt, self.account.cache_shares)

    def begin(self, now_ms: float) -> None:
        """Count a request in; raises ``Refused`` (429), and then nothing was counted. ``end`` must follow."""
        rules = self._rules
        verdict = self.account.meter.begin(rules, now_ms)
        limit = rules.concurrent_requests
        if verdict.is_full:
            raise Refused(
                429,
                "concurrency_limited",
                f"tenant {self.tenant} has {verdict.in_flight} requests in flight, allowed are {limit}",
                CONCURRENCY_RETRY_S,
            )
        if verdict.wait_s > 0:
            raise Refused(
                429,
                "rate_limited",
                f"tenant {self.tenant} may send {rules.requests_per_minute} requests a minute; "
                f"the next one is due in {verdict.wait_s:.1f} s",
                verdict.wait_s,
            )

    def standing(self, now_ms: float) -> Standing:
        """Return how much of the tenant's rates is used, for the headers of its answer."""
        return self.account.meter.standing(self._rules, now_ms)

    def end(self, now_ms: float) -> None:
        self.account.meter.end(self._rules, self._output_tokens, now_ms)

    @property
    def may_use_any_model(self) -> bool:
        return self._rules.models is None

    def may_use(self, model: str) -> bool:
        """Return whether the tenant may ask for a model."""
        return self._rules.models is None or model in self._rules.models

    def check_model(self, model: str) -> None:
        """Raise ``Refused`` (403) for a model that the tenant may not ask for."""
        if not self.may_use(model):
            raise Refused(403, "model_not_allowed", f"tenant {self.tenant} may not use model {model!r}", param="model")

    def check_feature(self, feature: str) -> None:
        """Raise ``Refused`` (403) for one of ``FEATURES`` that the tenant may not use."""
        if self._rules.features is not None and feature not in self._rules.features:
            raise Refused(403, "feature_not_allowed", f"tenant {self.tenant} may not use {feature}")

    def admit(self, requests: Sequence[InferenceRequest], prompt_tokens: int, now_ms: float) -> None:
        """Make the sequences of a request the tenant's: its salt, its share, its priority at most.

        Takes ``prompt_tokens`` from the token rate. Raises ``Refused`` (403, 429).
        """
        self.admit_using(
            _features(requests[0]) if self._rules.features is not None else (), requests, prompt_tokens, now_ms
        )

    def admit_using(
        self, features: Iterable[str], requests: Sequence[InferenceRequest], prompt_tokens: int, now_ms: float
    ) -> None:
        """Do the same for requests that use some of ``FEATURES``, as their body shows."""
        rules = self._rules
        for feature in features:
            self.check_feature(feature)
        wait_s = self.account.meter.take_tokens(rules, prompt_tokens, now_ms)
        if wait_s > 0:
            raise Refused(
                429,
                "rate_limited",
                f"tenant {self.tenant} may use {rules.tokens_per_minute} tokens a minute; "
                f"this prompt of {prompt_tokens} is due in {wait_s:.1f} s",
                wait_s,
            )
        self._prompt_tokens = prompt_tokens
        salt = cache_salt(self._secret, self.tenant, requests[0].cache_salt)
        for request in requests:
            request.cache_salt = salt
            request.cache_shares = self.account.cache_shares
            request.tenant = self.tenant
            request.tenant_weight = rules.weight
            request.priority = min(request.priority, rules.priority_max)
            if request.retention is not None:
                request.retention = request.retention.capped(rules.retention_priority_max)
            if request.session.keep_ms:
                request.kept_tokens_max = rules.kept_tokens_max

    def not_dispatched(self, now_ms: float) -> None:
        """Give the prompt tokens back: no worker saw them."""
        self.account.meter.give_back_tokens(self._rules, self._prompt_tokens, now_ms)
        self._prompt_tokens = 0

    def generated(self, output_tokens: int) -> None:
        """Note output tokens; they are charged at the end."""
        self._output_tokens += output_tokens

    @property
    def priority_max(self) -> int:
        return self._rules.priority_max

    @property
    def used(self) -> tuple[int, int]:
        return self._prompt_tokens, self._output_tokens


def _features(request: InferenceRequest) -> list[str]:
    """Return those of ``FEATURES`` that a request uses."""
    sampling = request.sampling
    guides = (
        sampling.guided_json,
        sampling.guided_regex,
        sampling.guided_grammar,
        sampling.guided_choice,
        sampling.structural_tag,
    )
    uses = {
        "guided_decoding": any(guide is not None for guide in guides),
        "logits_processors": bool(sampling.logits_processors),
        "logprobs": sampling.logprobs is not None,
        "media": request.multimodal is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
    }
    return [feature for feature in FEATURES if uses[feature]]


log = logging.getLogger(__name__)

CHECK_MS = 1000.0
"""Least time between two looks whether the file has changed; a look is one ``stat``."""

Signature = tuple[int, int, int]


class WatchedKeyFile:
    """The tenants of ``path``; ``on_reload`` gets ``loaded`` or ``refused`` after each change of the file."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        on_reload: Callable[[str], None],
        processes: int = 1,
    ) -> None:
        """Read the file; raises ``OSError`` or ``KeyFileError``.

        Of ``processes`` that share a port each allows an equal part of the limits.
        """
        self._path = path
        self._clock = clock
        self._on_reload = on_reload
        self.stale = False
        """Whether the file has changed to something that cannot be used."""
        self._seen = self._signature()
        self._checked_ms = clock.monotonic_ms()
        self._processes = processes
        self._tenants = Tenants(key_file.read(path).divided(processes))
        if path.stat().st_mode & 0o077:
            log.warning("%s can be read by others than its owner: chmod 600 it, its salt_secret is a secret", path)

    def tenants(self) -> Tenants:
        """Return the tenants as the file says now, or said before it broke."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._checked_ms >= CHECK_MS:
            self._checked_ms = now_ms
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._reload()
        return self._tenants

    def _signature(self) -> Signature | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _reload(self) -> None:
        try:
            document = key_file.read(self._path).divided(self._processes)
        except (OSError, KeyFileError) as error:
            self.stale = True
            log.error("reading API keys: %s. The previous keys stay in force: correct the file", error)
            self._on_reload("refused")
            return
        self.stale = False
        self._tenants.use(document)
        log.info("read API keys of %d tenants from %s", len(document.tenants), self._path)
        self._on_reload("loaded")


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

    def salt_of(self, headers: Headers, client_salt: str) -> str:
        """Return the salt for a request without an API key, which is the client's own unless clients are isolated."""
        return self._salt(headers, client_salt) if self._isolate else client_salt

    def _salt(self, headers: Headers, client_salt: str) -> str:
        """Return a salt that only requests of the same client have.

        What a client writes is hashed together with its header's value, so that it cannot write another's salt.
        """
        tenant = next((value for name, value in headers if name == self._header), b"").decode("latin-1")
        if not tenant and not client_salt:
            return secrets.token_hex(SALT_BYTES)
        return cache_salt(b"", tenant, client_salt)
