"""A model by its name on a hub (ORG/MODEL): fetched into the cache of this machine before the start."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import click

from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.settings import Settings
from poolgrid.server.workers.model_hub import ModelHubError, cached, fetch, is_hub_name, look_up

S = TypeVar("S", bound=Settings)


def with_directory(settings: S, name_field: str, *, weights: bool, dry_run: bool = False) -> S:
    """Return settings with the directory of a model that is named by its hub; clients know it by the name given.

    A router needs no ``weights``. With ``dry_run`` nothing is fetched, and the model stays named where it is not on
    this machine. Raises ``ValueError`` where it is not to be had.
    """
    model = str(getattr(settings, "model_path"))  # noqa: B009 - of several kinds of settings
    if not is_hub_name(model):
        return settings
    name = getattr(settings, name_field) or model.partition("@")[0]
    try:
        if dry_run:
            look_up(model)
            directory = cached(model) or Path(model)
        else:
            directory = fetch(model, weights=weights)
    except ModelHubError as error:
        raise ValueError(f"--model-path {model}: {error}") from None
    return settings.model_copy(update={"model_path": directory, name_field: name})


def router_model(settings: FrontendSettings) -> FrontendSettings:
    """Return a router's settings with the directory of its model; ends with status 2 where there is none."""
    try:
        return with_directory(settings, "served_model_name", weights=False)
    except ValueError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
