"""`poolgrid keys ...`: make and look at API keys and tenants, and CURVE keys of the ZMQ planes."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import zmq.auth

from poolgrid.server.cli.command_line import Group, as_json, print_json
from poolgrid.server.frontend.access import key_file
from poolgrid.server.frontend.access.key_file import Key, KeyFileError, Tenant
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.figures import counted

file = click.argument("file", type=click.Path(path_type=Path), help="File of API keys and tenants (JSON).")


@click.group(cls=Group)
def keys() -> None:
    """Create and list API keys, tenants and CURVE keys."""


def _examined(path: Path) -> tuple[key_file.KeyDocument | None, list[str]]:
    try:
        return key_file.read(path), []
    except KeyFileError as error:
        return None, [str(problem) for problem in error.problems]
    except OSError as error:
        return None, [f"cannot be read: {error.strerror}"]


def _read(path: Path) -> key_file.KeyDocument:
    document, problems = _examined(path)
    for problem in problems:
        click.echo(f"{path}: {problem}", err=True)
    if document is None:
        raise SystemExit(1)
    return document


@keys.command()
@file
@click.argument("tenant", help="Whose key it is; a new name makes a new tenant.")
@click.option("--name", default="", help="Purpose of the key, for lists.")
@click.option(
    "--expires",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]),
    metavar="TIME",
    help="When it stops to be taken, in UTC: a date, or a time like 2027-01-31T14:00:00.",
)
@click.option("--requests-per-minute", type=click.IntRange(1), help="The tenant's request rate.")
@click.option("--tokens-per-minute", type=click.IntRange(1), help="Its rate of prompt and output tokens.")
@click.option("--concurrent-requests", type=click.IntRange(1), help="Its requests in flight.")
@click.option("--priority-max", type=int, help="Highest priority that its requests get.")
@click.option("--weight", type=click.FloatRange(1e-6, 1e6), help="Its share of a full queue.")
@click.option("--model", multiple=True, help="A model that it may use; repeat for more. All by default.")
@click.option("--operator/--no-operator", default=None, help="Whether it may see and change the router.")
@as_json
def create(
    file: Path,
    tenant: str,
    name: str,
    expires: datetime | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent_requests: int | None,
    priority_max: int | None,
    weight: float | None,
    model: tuple[str, ...],
    operator: bool | None,
    as_json: bool,
) -> None:
    """Add a new key to a tenant and print it, once: the file keeps its hash only. Options change the tenant."""
    document = _read(file) if file.exists() else key_file.new_document()
    key = key_file.make_key()
    when = None if expires is None else expires.replace(tzinfo=UTC)
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "priority_max": priority_max,
        "weight": weight,
        "models": model or None,
        "operator": operator,
    }
    there = document.tenants.get(tenant, Tenant())
    changed = msgspec.structs.replace(
        there,
        keys=(*there.keys, Key(key_file.hash_key(key), name, when)),
        **{field: value for field, value in given.items() if value is not None},
    )
    document = msgspec.structs.replace(document, tenants={**document.tenants, tenant: changed})
    try:
        # What is written is what a router would take.
        key_file.parse(msgspec.json.encode(document), str(file))
        key_file.write(file, document)
    except KeyFileError as error:
        click.echo(f"{error}; nothing was written", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        click.echo(f"writing {file}: {error.strerror}; nothing was written", err=True)
        raise SystemExit(1) from None
    if as_json:
        print_json({"key": key, "id": changed.keys[-1].id, "tenant": tenant, "file": str(file)})
    else:
        click.echo(f"{key}")
    click.echo(f"key {changed.keys[-1].id} of tenant {tenant} is in {file}; it is not shown again", err=True)


@keys.command()
@file
@click.argument("key_id", help="Short name of the key, as `list` shows it.")
def revoke(file: Path, key_id: str) -> None:
    """Take a key away; running routers refuse it once they have read the file again. Its tenant stays."""
    document = _read(file)
    tenants = {
        name: msgspec.structs.replace(tenant, keys=tuple(key for key in tenant.keys if key.id != key_id))
        for name, tenant in document.tenants.items()
    }
    if tenants == document.tenants:
        click.echo(f"{file} has no key {key_id!r}; nothing was written", err=True)
        raise SystemExit(1)
    try:
        key_file.write(file, msgspec.structs.replace(document, tenants=tenants))
    except OSError as error:
        click.echo(f"writing {file}: {error.strerror}; nothing was written", err=True)
        raise SystemExit(1) from None


@keys.command("hash")
def hash_command() -> None:
    """Print what a file keeps of the key on standard input (not of an argument: shells remember those)."""
    key = sys.stdin.readline().strip()
    if not key:
        click.echo("there is no key on standard input", err=True)
        raise SystemExit(1)
    click.echo(key_file.hash_key(key))


@keys.command("list")
@file
@as_json
def list_command(file: Path, as_json: bool) -> None:
    """Show every tenant with its limits, and the short names of its keys; never a key or its hash."""
    tenants = {name: _tenant_row(tenant) for name, tenant in _read(file).tenants.items()}
    if as_json:
        print_json(tenants)
        return
    for name, row in tenants.items():
        limits = {field: value for field, value in row.items() if field != "keys"}
        click.echo(" ".join([name, *(f"{field}={_shown(value)}" for field, value in limits.items())]))
        for key in row["keys"]:
            until = f"{'expired' if key['expired'] else 'expires'} {key['expires']}" if key["expires"] else ""
            click.echo(f"  {' '.join(word for word in (key['id'], key['name'], until) if word)}")


def _tenant_row(tenant: Tenant) -> dict[str, Any]:
    now = datetime.fromtimestamp(SystemClock().wall_ms() / 1000, UTC)
    row: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(tenant, keys=()))
    keys = [
        {
            "id": key.id,
            "name": key.name,
            "expires": None if key.expires is None else key.expires.isoformat(),
            "expired": key.expires is not None and key.expires <= now,
        }
        for key in tenant.keys
    ]
    return {**row, "keys": keys}


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()


@keys.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), help="Files of API keys (JSON).")
@as_json
def check(files: tuple[Path, ...], as_json: bool) -> None:
    """Find every problem of files, one a line. Status 1 when there is any."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        document, problems = _examined(file)
        tenants = document.tenants if document is not None else {}
        count = sum(len(tenant.keys) for tenant in tenants.values())
        rows[str(file)] = {"tenants": len(tenants), "keys": count, "problems": problems}
        if as_json:
            continue
        for problem in problems:
            click.echo(f"{file}: {problem}", err=True)
        if not problems:
            click.echo(f"{file}: {counted(len(tenants), 'tenant')} with {counted(count, 'key')}")
    if as_json:
        print_json(rows)
    raise SystemExit(1 if any(row["problems"] for row in rows.values()) else 0)


@keys.command()
@click.argument("directory", type=click.Path(path_type=Path), help="Where the two files go; made if it is not there.")
@click.option("--name", default="poolgrid", help="Name of the key pair. [default: poolgrid]")
@as_json
def curve(directory: Path, name: str, as_json: bool) -> None:
    """Make a CURVE key pair for the ZMQ planes: NAME.key_secret for --curve-key, NAME.key to share."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        click.echo(f"--name is {name!r}: allowed are 1 to 64 letters, digits, '.', '_', '-'", err=True)
        raise SystemExit(2)
    there = [path for path in (directory / f"{name}.key", directory / f"{name}.key_secret") if path.exists()]
    if there:
        click.echo(f"{there[0]} exists already; nothing was written", err=True)
        raise SystemExit(1)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The file is private from its first byte on.
        before = os.umask(0o077)
        try:
            public, secret = zmq.auth.create_certificates(directory, name)
        finally:
            os.umask(before)
        os.chmod(public, 0o644)
    except OSError as error:
        click.echo(f"writing to {directory}: {error.strerror}", err=True)
        raise SystemExit(1) from None
    if as_json:
        print_json({"secret": str(secret), "public": str(public)})
        return
    click.echo(f"{secret}")
    click.echo(f"public key: {public}", err=True)
