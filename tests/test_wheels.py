"""``python -m tests.wheels``, as far as nothing is compiled."""

from __future__ import annotations

import pytest

from tests import wheels

CASES = [([], "no Python is named"), (["python3", "python0.9"], "python0.9 not found; nothing was made")]


@pytest.mark.parametrize(("pythons", "said"), CASES)
def test_nothing_is_made_unless_every_python_is_there(
    pythons: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "built", lambda *_: pytest.fail("a wheel was built"))

    assert wheels.main(pythons) == 2
    assert said in capsys.readouterr().err
