"""Every setting and endpoint of the global router is described where people look."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from lab.website.configuration_page import description_cell
from poolgrid.kernel.pool_grids.grid import PoolStanding
from poolgrid.server.global_router.http_api import add_global_router_endpoints
from poolgrid.server.global_router.settings import GlobalRouterSettings
from tests.global_router.documents import ROOT, aggregated
from tests.global_router.fake_fleet import FakeFleet

PAGE = (ROOT / "docs" / "global_router.md").read_text()
SETTINGS = (ROOT / "docs" / "configuration.md").read_text()


def test_every_setting_is_documented_with_its_description() -> None:
    for name, field in GlobalRouterSettings.model_fields.items():
        assert f"`--{name.replace('_', '-')}`" in SETTINGS, f"docs/configuration.md does not name the setting {name}"
        assert field.description
        assert description_cell(field.description) in SETTINGS, f"docs/configuration.md describes {name} differently"


def test_every_endpoint_and_state_is_documented() -> None:
    app = FastAPI()
    fleet = FakeFleet(aggregated())
    add_global_router_endpoints(app, fleet.service, fleet.clock)

    paths = set(app.openapi()["paths"])
    assert len(paths) >= 5
    for path in paths:
        assert path.replace("{request_id}", "{id}") in PAGE
    for state in PoolStanding:
        assert f"`{state.value}`" in PAGE


@pytest.mark.parametrize("value", ["fast", "=http://x", "fast=10.0.0.1:8000"])
def test_a_pool_url_has_a_name_and_a_url(value: str) -> None:
    with pytest.raises(ValidationError, match="is not of the form NAME=http://host:port"):
        GlobalRouterSettings(config=Path("x"), pool_url=(value,))


def test_pool_urls_are_read_by_name() -> None:
    settings = GlobalRouterSettings(config=Path("x"), pool_url=("a=http://h:1/", "b=http://h:2/x=1"))

    assert settings.pool_urls() == {"a": "http://h:1", "b": "http://h:2/x=1"}
