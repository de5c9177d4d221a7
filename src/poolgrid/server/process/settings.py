"""The base of every process's settings: one model is the command line, the environment and the documentation.

Each service declares its settings once, as a ``Settings`` model whose fields carry a description, a default and a
range. ``poolgrid.server.cli.options`` turns the fields into options (``lease_ttl_ms`` becomes ``--lease-ttl-ms``) and
environment variables (``POOLGRID_LEASE_TTL_MS``); a test fails when ``docs/configuration.md`` does not name a field.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from poolgrid.kernel.wire.addresses import is_name, parse_name, without_credentials, zmq_endpoint_problem


class Settings(BaseModel):
    """Immutable, complete and strict: an unknown field is an error, never ignored.

    What checks values is built when it is first used: a worker knows the settings of every engine and has those of one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    panel: ClassVar[str] = "Options"
    """Heading in the help of a command, of the fields that a model declares itself."""

    @classmethod
    def panels(cls) -> dict[str, str]:
        """Return the panel of each field: that of the last class that declares it."""
        declared = [each for each in reversed(cls.__mro__) if issubclass(each, Settings)]
        names = {name: each.panel for each in declared for name in inspect.get_annotations(each)}
        return {name: names[name] for name in cls.model_fields}


S = TypeVar("S", bound=Settings)


def with_constants(model: type[S], values: Mapping[str, Any]) -> S:
    """Return settings in which values that are of no field stand in for the class's constants.

    For tests, and for recordings of a version in which a constant was a setting.
    """
    constants = {name: value for name, value in values.items() if name not in model.model_fields}
    for name in constants:
        if not hasattr(model, name):
            raise ValueError(f"{name} is no setting and no constant of {model.__name__}")
    kind: type[S] = (
        type(model.__name__, (model,), {"__module__": model.__module__, **constants}) if constants else model
    )
    return kind.model_validate({name: value for name, value in values.items() if name not in constants})


class OptionError(ValueError):
    """The message begins with an option and its value, which cannot be used; the process ends with status 2."""


INPUT_FILE = "input file"
"""Marks paths of files that are read at the start."""

InputFile = Annotated[Path, INPUT_FILE]
"""A file that the command line refuses when it does not exist, before anything is started."""

OUTPUT_DIRECTORY = "output directory"
"""Marks paths of directories that are written to."""

OutputDirectory = Annotated[Path, OUTPUT_DIRECTORY]
"""A directory that the command line refuses when it cannot be one, before anything is started."""


def _check_endpoint(endpoint: str) -> str:
    problem = zmq_endpoint_problem(endpoint, local=True)
    if problem is not None:
        raise ValueError(f"{without_credentials(endpoint)!r} {problem}; allowed are tcp://host:port and ipc://path")
    return endpoint


def _check_address(address: str) -> str:
    if is_name(address):
        parse_name(address)
        return address
    return _check_endpoint(address)


ZmqEndpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""Where another process listens: wrong at the start is better than an error out of ZMQ, which names no setting."""

ZmqAddress = Annotated[str, AfterValidator(_check_address)]
"""The same, or the name of an endpoint (``dyn://``) where processes have names."""
