"""Every setting of a worker is described where people look."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from lab.website.configuration_page import description_cell
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_setting_is_documented_with_its_description() -> None:
    page = PAGE.read_text()

    for name, field in SimulatedWorkerSettings.model_fields.items():
        assert f"`--{name.replace('_', '-')}" in page, f"docs/configuration.md does not name the setting {name}"
        assert field.description
        assert description_cell(field.description) in page, f"docs/configuration.md describes {name} differently"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_block_size": 0}, "kv_block_size"),
        ({"max_num_tokens": 10}, "max_num_tokens is 10, allowed are integers from max_batch_size"),
        ({"host": "0.0.0.0"}, "set advertise_host"),
        ({"speedup": 0}, "speedup"),
        ({"bloc_size": 4}, "bloc_size"),
        ({"role": "encode"}, "an encode worker needs modality multimodal"),
        ({"role": "prefil"}, "role"),
    ],
)
def test_impossible_settings_are_refused_naming_the_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SimulatedWorkerSettings.model_validate(fields)
