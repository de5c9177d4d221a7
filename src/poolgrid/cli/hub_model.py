"""A model by its name on a hub (ORG/MODEL): from the cache of this machine, or fetched into it before the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import click

from poolgrid.frontend.settings import FrontendSettings
from poolgrid.process.settings import Settings
from poolgrid.workers.model_cache.cache import ModelCache, ModelCacheError, default_directory
from poolgrid.workers.model_cache.fetching import ModelFetch, is_hub_name, parse_source

S = TypeVar("S", bound=Settings)

TOKENIZER = "tokenizer.json"

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*")
"""Files that a router does not need."""


def model_directory(model: str, *, weights: bool, fetch: bool = True) -> Path:
    """Return the directory of a model that a hub has; raises ``ValueError`` where it is not to be had.

    A router needs no ``weights``, and takes a model that has them where one is there. Without ``fetch`` the hub is
    only asked whether it has the model.
    """
    from poolgrid.cli.model import reported

    try:
        source = parse_source(model)
        cache = ModelCache(default_directory(os.environ))
        kept = _kept(cache, source.name, weights=weights)
        if kept is not None and not fetch:
            return cache.path(kept)
        name = kept or (source.name if weights else _without_weights(source.name))
        exclude = () if name == source.name else WEIGHTS
        with reported(name) as report:
            bringing = ModelFetch(cache, source, name, report, exclude=exclude)
            if fetch:
                bringing.run()
            else:
                bringing.look_up()
        return cache.path(name)
    except ModelCacheError as error:
        raise ValueError(f"--model-path {model}: {error}") from None


def cached_directory(model: str) -> Path | None:
    """Return the directory of a hub's model that is on this machine already, with its tokenizer; asks no hub."""
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_name(model):
        return None
    try:
        source = parse_source(model)
        cache = ModelCache(default_directory(os.environ))
        kept = _kept(cache, source.name, weights=False)
        if kept is not None:
            return cache.path(kept)
    except ModelCacheError:
        pass  # what is broken there is not taken; Hugging Face's own cache may have it
    try:
        found = try_to_load_from_cache(model, TOKENIZER)
    except ValueError:
        return None  # no name of Hugging Face's hub
    return Path(found).parent if isinstance(found, str) else None


def _kept(cache: ModelCache, name: str, *, weights: bool) -> str | None:
    """Return the name of a model in the cache, whole or, where they are not needed, without its weights."""
    names = (name,) if weights else (name, _without_weights(name))
    return next((each for each in names if cache.manifest(each) is not None), None)


def _without_weights(name: str) -> str:
    return f"{name}-tokenizer"


def with_directory(settings: S, name_field: str, *, weights: bool, fetch: bool = True) -> S:
    """Return settings with the directory of a model that is named by its hub; clients know it by the name given."""
    model = str(getattr(settings, "model_path"))  # noqa: B009 - of several kinds of settings
    if not is_hub_name(model):
        return settings
    name = getattr(settings, name_field) or model.partition("@")[0]
    directory = model_directory(model, weights=weights, fetch=fetch)
    return settings.model_copy(update={"model_path": directory, name_field: name})


def router_model(settings: FrontendSettings) -> FrontendSettings:
    """Return a router's settings with the directory of its model; ends with status 2 where there is none."""
    try:
        return with_directory(settings, "served_model_name", weights=False)
    except ValueError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
