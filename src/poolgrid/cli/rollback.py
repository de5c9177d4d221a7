"""`poolgrid config rollback`: ask a running global router for its previous document."""

from __future__ import annotations

import click
import httpx
import msgspec

from poolgrid.cli.command_line import print_json
from poolgrid.cli.router_client import api_key_headers, key_hint
from poolgrid.wire.answers import ReloadAnswer

TIMEOUT_S = 10.0


def rollback(url: str, as_json: bool = False) -> int:
    """Roll back, print what changed, return the exit status."""
    place = f"{url.rstrip('/')}/v1/config/rollback"
    try:
        answer = httpx.post(place, timeout=TIMEOUT_S, headers=api_key_headers())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        click.echo(f"asking {place}: {error}; nothing is known to have changed", err=True)
        return 1
    if answer.status_code != 200:
        hint = key_hint(answer.status_code)
        click.echo(f"asking {place}: status {answer.status_code}: {_message(answer)}{hint}", err=True)
        return 1
    try:
        done = msgspec.json.decode(answer.content, type=ReloadAnswer)
    except (msgspec.MsgspecError, ValueError) as error:
        click.echo(f"asking {place}: the answer is not a global router's: {error}", err=True)
        return 1
    if as_json:
        print_json(done)
        return 0
    click.echo(f"rolled back: revision {done.revision} is in force")
    for change in done.changes:
        click.echo(f"  {change}")
    return 0


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
