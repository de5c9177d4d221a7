"""The pools that ``poolgrid bench --policies`` compares: one of simulated workers for each policy, on free ports."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import click
from pydantic import ValidationError

from poolgrid.cli.local_pool import LocalPool, UpSettings, plan
from poolgrid.cli.options import option_name, parsed_options
from poolgrid.cli.part import PartFailed
from poolgrid.frontend.prompt_model import ModelDirectoryError, PromptModel

OWN = ("port", "policy", "data_dir", "pools", "engine", "dry_run")
"""Settings of a pool that are not for its options to say."""


class PoolsFailed(Exception):
    """The pools could not be started; the message has the reason."""


@asynccontextmanager
async def open_pools(policies: Sequence[str], options: str) -> AsyncIterator[dict[str, str]]:
    """Run a pool for each policy; their URLs by policy. ``options`` are those of ``poolgrid up``.

    Raises ``PoolsFailed``; whatever ends the block, the pools are ended.
    """
    given = settings_of(options)
    async with AsyncExitStack() as opened:
        urls: dict[str, str] = {}
        try:
            model = PromptModel.load(given.model_path)
            for policy in policies:
                directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-bench-")))
                settings = given.model_copy(update={"policy": policy, "port": 0})
                pool = LocalPool(settings, directory, model, plan(settings, model, lambda _: ()))
                opened.push_async_callback(pool.stop)
                urls[policy] = await pool.start()
        except (PartFailed, ModelDirectoryError, TimeoutError, OSError) as error:
            raise PoolsFailed(
                f"starting a pool for each of {', '.join(policies)}: {error or 'not ready in time'}"
            ) from None
        yield urls


def settings_of(options: str) -> UpSettings:
    """Return the settings that options of ``poolgrid up`` make; raises ``PoolsFailed``."""
    try:
        given = parsed_options(UpSettings, shlex.split(options))
        if own := sorted(set(given) & set(OWN)):
            raise ValueError(f"{option_name(own[0])} is no option of these pools")
        return UpSettings(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        place = option_name(str(fault["loc"][0])) if fault["loc"] else "options"
        said = f"{place}: {fault['msg'].removeprefix('Value error, ')}"
    except click.ClickException as error:
        said = error.format_message()
    except ValueError as error:
        said = str(error)
    raise PoolsFailed(f"reading --pool-options {options!r}: {said}; nothing was started")
