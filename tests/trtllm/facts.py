"""The contract facts that the fake and the run-time checks are compared with."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tests.fakes import FAKES_PATH


@cache
def facts() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FAKES_PATH / "contract_1_2_1.json").read_text(encoding="utf-8"))
    return loaded


def fields_of(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of a section, without its notes."""
    return {name: each for name, each in section.items() if not name.startswith(("_", "*")) and isinstance(each, dict)}
