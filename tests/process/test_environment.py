"""What is set for imports, and what engines get of it."""

from __future__ import annotations

import os

import pytest

from poolgrid.server.process import environment


def test_engines_get_what_the_operator_has_set_and_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OPENBLAS_NUM_THREADS": "8", "PATH": "/bin"})
    monkeypatch.setattr(environment, "_ours", set())

    environment.prepare_imports()

    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
    assert environment.given_environment() == {"OPENBLAS_NUM_THREADS": "8", "PATH": "/bin"}
