"""Cache salts of tenants: no two tenants ever share, find or probe each other's cached prompts."""

from __future__ import annotations

import hashlib

import msgspec

SALT_BYTES = 16


def cache_salt(secret: bytes, tenant: str, client_salt: str) -> str:
    """Return the salt of a tenant's request: a keyed hash of the tenant's name and the client's own salt.

    The client's salt divides the tenant's cache further and can never leave it: without the secret nobody can choose a
    salt that gives another tenant's. Names and salts of any length are kept apart by their JSON form.
    """
    message = msgspec.json.encode((tenant, client_salt))
    return hashlib.blake2b(message, key=secret, digest_size=SALT_BYTES, person=b"poolgrid-salt").hexdigest()
