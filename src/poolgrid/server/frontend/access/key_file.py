"""The file of API keys and tenants: read, checked, written. It holds hashes of keys, never keys.

Keys are 32 random bytes, so one SHA-256 of a key is as good as any slow hash: there is no dictionary to try, and 2^256
guesses are out of reach at any speed. Slow hashes (bcrypt, scrypt, Argon2) protect what people choose; here they would
only make every request pay. A reader of the file cannot use a key from it.

``salt_secret`` keys the tenants' cache salts (``cache_salt``). All routers of a pool must have the same one, which they
have when they share the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.requests import RETENTION_DEFAULT

KEY_PREFIX = "pg-"
"""How keys begin, so that scanners of source code find a leaked one."""

KEY_BYTES = 32
HASH_PREFIX = "sha256:"
KEY_ID_DIGITS = 12
"""Leading digits of a key's hash that name it where people read."""

TENANTS_MAX = 10_000
KEYS_MAX = 100_000
FILE_BYTES_MAX = 64 * 1024 * 1024
"""Far beyond ``KEYS_MAX`` keys; a file that is larger is not one of ours."""

FEATURES = ("guided_decoding", "logits_processors", "logprobs", "media", "prompt_logprobs")
"""What a tenant may be refused by name."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-f]{{64}}")
_SECRET = re.compile(r"[0-9a-f]{64}")

PositiveInt = Annotated[int, Meta(ge=1, le=2**53)]


class Key(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """One API key of a tenant."""

    hash: str
    """``sha256:`` and the hexadecimal digest of the key's text."""
    name: str = ""
    """What it is for, for people."""
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    """From then on it is refused; ``None`` = never."""

    @property
    def id(self) -> str:
        return self.hash.removeprefix(HASH_PREFIX)[:KEY_ID_DIGITS]


LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


class Tenant(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What one tenant may do; ``None`` = no limit."""

    keys: tuple[Key, ...] = ()
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Share of a full queue's turns, against other tenants of the same priority."""
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    """Prompt tokens when a request is admitted, output tokens when they are known."""
    concurrent_requests: PositiveInt | None = None
    priority_max: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Requests that ask for more are given this."""
    retention_priority_max: Annotated[int, Meta(ge=0, le=100)] = RETENTION_DEFAULT
    """The same for their blocks in workers' caches; 35 is what all blocks have."""
    kept_tokens_max: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Prompt tokens that ``cache_control`` and the like may keep at a time, in the whole pool."""
    models: tuple[str, ...] | None = None
    """Names of models and LoRA adapters, as clients write them."""
    features: tuple[str, ...] | None = None
    """Those of ``FEATURES`` that may be used."""
    operator: bool = False
    """Whether its keys open the endpoints that show and change the router."""

    def divided(self, processes: int) -> Tenant:
        """Return what one of several processes that share a port allows, rounded up."""
        limits = {name: getattr(self, name) for name in LIMITS}
        parts = {name: None if limit is None else -(-limit // processes) for name, limit in limits.items()}
        return msgspec.structs.replace(self, **parts)


class KeyDocument(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The whole file."""

    version: Literal[1]
    salt_secret: str
    tenants: dict[str, Tenant]

    def divided(self, processes: int) -> KeyDocument:
        """Return the document as one of several processes that share a port goes by it."""
        if processes == 1:
            return self
        tenants = {name: tenant.divided(processes) for name, tenant in self.tenants.items()}
        return msgspec.structs.replace(self, tenants=tenants)


class KeyFileError(ValueError):
    """A file of API keys cannot be used; ``problems`` has one line each, with the place in the document."""

    def __init__(self, what: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{what}: {'; '.join(problems)}")


SALT_BYTES = 16


def cache_salt(secret: bytes, tenant: str, client_salt: str) -> str:
    """Return the salt of a tenant's request: a keyed hash of the tenant's name and the client's own salt.

    The client's salt divides the tenant's cache further and can never leave it: without the secret no client can
    choose a salt that gives another tenant's. Names and salts of any length are kept apart by their JSON form.
    """
    message = msgspec.json.encode((tenant, client_salt))
    return hashlib.blake2b(message, key=secret, digest_size=SALT_BYTES, person=b"poolgrid-salt").hexdigest()


def make_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """Return what the file keeps of a key."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def new_document() -> KeyDocument:
    """Return a document without tenants and with a fresh secret."""
    return KeyDocument(1, secrets.token_hex(32), {})


def parse(raw: bytes, what: str) -> KeyDocument:
    """Return the document in ``raw``; raises ``KeyFileError`` with every problem that could be found."""
    try:
        document = msgspec.json.decode(raw, type=KeyDocument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error) if isinstance(error, msgspec.ValidationError) else f"it is not JSON ({error})"
        raise KeyFileError(what, [f"{why}; poolgrid keys create FILE TENANT makes such a file"]) from None
    problems = list(_problems(document))
    if problems:
        raise KeyFileError(what, problems)
    return document


def read(path: Path) -> KeyDocument:
    """Return the document of a file; raises ``OSError`` or ``KeyFileError``."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise KeyFileError(str(path), [f"the file is larger than {FILE_BYTES_MAX} bytes"])
    return parse(path.read_bytes(), str(path))


def write(path: Path, document: KeyDocument) -> None:
    """Replace a file in one step, readable by its owner only; raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _problems(document: KeyDocument) -> Iterator[str]:
    if not _SECRET.fullmatch(document.salt_secret):
        yield "salt_secret: it must be 64 hexadecimal digits (32 random bytes)"
    if len(document.tenants) > TENANTS_MAX:
        yield f"tenants: there are {len(document.tenants)}, allowed are {TENANTS_MAX}"
    if sum(len(tenant.keys) for tenant in document.tenants.values()) > KEYS_MAX:
        yield f"tenants: they have more than {KEYS_MAX} keys together"
    owners: dict[str, str] = {}
    for name, tenant in document.tenants.items():
        place = f"tenants.{name}"
        if not _TENANT_NAME.fullmatch(name):
            yield f"{place}: a name has 1 to 64 letters, digits, '.', '_', '-', and begins with a letter or digit"
        for index, key in enumerate(tenant.keys):
            if not _HASH.fullmatch(key.hash):
                yield f"{place}.keys[{index}].hash: it must be sha256: and 64 hexadecimal digits (poolgrid keys hash)"
            elif key.hash in owners:
                yield f"{place}.keys[{index}].hash: the same key is at {owners[key.hash]}"
            owners.setdefault(key.hash, f"{place}.keys[{index}]")
        for feature in tenant.features or ():
            if feature not in FEATURES:
                yield f"{place}.features: {feature!r} is not known, allowed are {', '.join(FEATURES)}"
