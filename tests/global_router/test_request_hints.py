"""What clients may ask for, and what is called an error of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.request_hints import HintError, RequestHints, Target, read_hints


def test_targets_priority_and_length_are_read() -> None:
    nvext = {"router": {"ttft_target": 0, "itl_target": 20.5}, "agent_hints": {"priority": -3, "osl": 0}, "x": 1}

    assert read_hints(nvext) == RequestHints(
        {"ttft": Target(0.0, "nvext.router.ttft_target"), "itl": Target(20.5, "nvext.router.itl_target")}, -3, 0
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1, -0.001, "200", True, [], {}, 10**400])
@pytest.mark.parametrize("name", ["ttft_target", "itl_target"])
def test_a_target_that_cannot_be_used_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(HintError) as caught:
        read_hints({"router": {name: value}})

    assert caught.value.field == f"nvext.router.{name}"
    assert str(caught.value).startswith(f"nvext.router.{name} is ")
    assert str(caught.value).endswith("must be a finite number of milliseconds, 0 or more")


@pytest.mark.parametrize("text", ["", "nan", "inf", "-5", "fast", "1_000", "9" * 400, "1e999"])
def test_a_header_that_cannot_be_used_is_named(text: str) -> None:
    with pytest.raises(HintError, match=r"^x-ttft-target-ms is "):
        read_hints(None, {"x-ttft-target-ms": text})


@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        ([], "nvext"),
        ("x", "nvext"),
        ({"router": 5}, "nvext.router"),
        ({"agent_hints": [1]}, "nvext.agent_hints"),
        ({"agent_hints": {"priority": 1.0}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"priority": True}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"priority": 2**31}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"osl": -1}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"osl": "many"}}, "nvext.agent_hints.osl"),
    ],
)
def test_other_hints_are_named_too(nvext: Any, field: str) -> None:
    with pytest.raises(HintError) as caught:
        read_hints(nvext)

    assert caught.value.field == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["router", "agent_hints", "ttft_target", "itl_target", "priority", "osl"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(nvext=JSON, header=st.none() | st.text(max_size=12))
def test_whatever_a_client_sends_is_a_hint_or_a_named_error(nvext: Any, header: str | None) -> None:
    headers = {} if header is None else {"x-itl-target-ms": header}
    named = ""
    hints = RequestHints()
    try:
        hints = read_hints(nvext, headers)
    except HintError as error:
        named = error.field

    assert named.startswith(("nvext", "x-itl-target-ms")) or named == ""
    assert all(0 <= target.value_ms < float("inf") for target in hints.targets.values())
