"""`poolgrid config rollback`: ask a running global router for its previous document."""

from __future__ import annotations

import httpx
import typer

from poolgrid.cli.api_key import api_key_headers

TIMEOUT_S = 10.0


def rollback(url: str) -> int:
    """Roll back, print what changed, return the exit status."""
    place = f"{url.rstrip('/')}/v1/config/rollback"
    try:
        answer = httpx.post(place, timeout=TIMEOUT_S, headers=api_key_headers())
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        typer.echo(f"asking {place}: {error}; nothing is known to have changed", err=True)
        return 1
    if answer.status_code != 200:
        message = body.get("error", {}).get("message") if isinstance(body, dict) else None
        typer.echo(f"asking {place}: status {answer.status_code}: {message or answer.text[:200]}", err=True)
        return 1
    typer.echo(f"rolled back: revision {body['revision']} is in force")
    for change in body["changes"]:
        typer.echo(f"  {change}")
    return 0
