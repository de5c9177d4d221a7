"""`poolgrid keys ...`: make and look at API keys and tenants, and CURVE keys of the ZMQ planes."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import zmq.auth

from poolgrid.frontend.access import key_file
from poolgrid.frontend.access.key_file import Key, KeyFileError, Tenant
from poolgrid.runtime.clock import SystemClock

app = typer.Typer(help="Make and look at API keys, tenants and CURVE keys.", no_args_is_help=True)

KeyFile = Annotated[Path, typer.Argument(help="File of API keys and tenants (JSON).")]


def _read(path: Path) -> key_file.KeyDocument:
    try:
        return key_file.read(path)
    except KeyFileError as error:
        for problem in error.problems:
            typer.echo(f"{path}: {problem}", err=True)
    except OSError as error:
        typer.echo(f"reading {path}: {error.strerror}", err=True)
    raise typer.Exit(1)


@app.command()
def create(
    file: KeyFile,
    tenant: Annotated[str, typer.Argument(help="Whose key it is; a new name makes a new tenant.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    expires: Annotated[
        datetime | None,
        typer.Option(
            help="When it stops to be taken, in UTC.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]
        ),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="The tenant's request rate.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Its rate of prompt and output tokens.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1, help="Its requests in flight.")] = None,
    priority_max: Annotated[int | None, typer.Option(help="Highest priority that its requests get.")] = None,
    weight: Annotated[float | None, typer.Option(min=1e-6, max=1e6, help="Its share of a full queue.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may use; repeat for more. All by default.")
    ] = None,
    operator: Annotated[
        bool | None, typer.Option("--operator/--no-operator", help="Whether it may see and change the router.")
    ] = None,
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
        "models": tuple(model) if model else None,
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
        typer.echo(f"{error}; nothing was written", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"writing {file}: {error.strerror}; nothing was written", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{key}")
    typer.echo(f"key {changed.keys[-1].id} of tenant {tenant} is in {file}; it is not shown again", err=True)


@app.command()
def revoke(
    file: KeyFile, key_id: Annotated[str, typer.Argument(help="Short name of the key, as `list` shows it.")]
) -> None:
    """Take a key away; running routers refuse it once they have read the file again. Its tenant stays."""
    document = _read(file)
    tenants = {
        name: msgspec.structs.replace(tenant, keys=tuple(key for key in tenant.keys if key.id != key_id))
        for name, tenant in document.tenants.items()
    }
    if tenants == document.tenants:
        typer.echo(f"{file} has no key {key_id!r}; nothing was written", err=True)
        raise typer.Exit(1)
    try:
        key_file.write(file, msgspec.structs.replace(document, tenants=tenants))
    except OSError as error:
        typer.echo(f"writing {file}: {error.strerror}; nothing was written", err=True)
        raise typer.Exit(1) from None


@app.command("hash")
def hash_command() -> None:
    """Print what a file keeps of the key on standard input (not of an argument: shells remember those)."""
    key = sys.stdin.readline().strip()
    if not key:
        typer.echo("there is no key on standard input", err=True)
        raise typer.Exit(1)
    typer.echo(key_file.hash_key(key))


@app.command("list")
def list_command(file: KeyFile) -> None:
    """Print every tenant with its limits, and the short names of its keys."""
    now = datetime.fromtimestamp(SystemClock().wall_ms() / 1000, UTC)
    for name, tenant in _read(file).tenants.items():
        limits = msgspec.to_builtins(msgspec.structs.replace(tenant, keys=()))
        typer.echo(" ".join([name, *(f"{field}={_shown(value)}" for field, value in limits.items())]))
        for key in tenant.keys:
            words = [f"  {key.id}"]
            if key.name:
                words.append(key.name)
            if key.expires is not None:
                words.append(f"{'expired' if key.expires <= now else 'expires'} {key.expires.isoformat()}")
            typer.echo(" ".join(words))


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()


@app.command()
def check(file: KeyFile) -> None:
    """Find every problem of a file, one a line. Status 1 when there is any."""
    document = _read(file)
    keys = sum(len(tenant.keys) for tenant in document.tenants.values())
    typer.echo(f"{file}: {len(document.tenants)} tenants with {keys} keys")


@app.command()
def curve(
    directory: Annotated[Path, typer.Argument(help="Where the two files go; it is made if it is not there.")],
    name: Annotated[str, typer.Option(help="Name of the key pair.")] = "poolgrid",
) -> None:
    """Make a CURVE key pair for the ZMQ planes: NAME.key_secret for --curve-key, NAME.key for everybody."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        typer.echo(f"--name is {name!r}: allowed are 1 to 64 letters, digits, '.', '_', '-'", err=True)
        raise typer.Exit(2)
    there = [path for path in (directory / f"{name}.key", directory / f"{name}.key_secret") if path.exists()]
    if there:
        typer.echo(f"{there[0]} exists already; nothing was written", err=True)
        raise typer.Exit(1)
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
        typer.echo(f"writing to {directory}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{secret}")
    typer.echo(f"public key: {public}", err=True)
