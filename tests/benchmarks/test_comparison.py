"""The comparison of routers: the same traffic for each, and figures that say what happened."""

from __future__ import annotations

import pytest

from lab.benchmarks.chat_text import ChatText
from lab.comparison.__main__ import KILL, RESTART, parsed, plans
from lab.comparison.load import Record
from lab.comparison.report import Run, figures, markdown, whole_share
from lab.comparison.traffic import LEVELS, PROMPT_TOKENS_MAX, Traffic


def traffic(scale: float = 1.0) -> Traffic:
    return Traffic(ChatText([f"word{at}" for at in range(200)], lambda piece: max(1, len(piece) // 4)), scale)


def record(turn: int, prompt: int, cached: int, fault: str = "") -> Record:
    return Record(0, turn, 0.0, 8, 50.0, 200.0, 10.0, [(10.0, 7)], prompt, 8, cached, "", fault)


@pytest.mark.parametrize("level", LEVELS)
def test_every_router_gets_the_same_sessions_of_a_seed(level: str) -> None:
    once, again = (traffic(0.1).sessions(level, 3, 10.0, 4) for _ in range(2))

    assert once == again
    assert once == traffic(0.1).sessions(level.partition("-")[0], 3, 10.0, 4)
    assert once != traffic(0.1).sessions(level, 4, 10.0, 4)
    assert [each.at_s for each in once] == sorted(each.at_s for each in once)


def test_sessions_share_few_system_prompts_and_stay_within_what_engines_serve() -> None:
    sessions = traffic(0.2).sessions("heavy", 1, 30.0, 4)

    assert len({each.system for each in sessions}) <= 9 < len(sessions)
    for session in sessions:
        asked = sum(turn.answer_tokens for turn in session.turns)
        words = len(session.system) + sum(len(turn.user) for turn in session.turns)
        assert words / 6 + asked < PROMPT_TOKENS_MAX


def test_a_later_turn_is_whole_when_it_reuses_the_prompt_before_it() -> None:
    whole = [record(0, 1000, 0), record(1, 1500, 992), record(2, 1900, 1488)]

    assert whole_share(whole) == 1.0
    assert whole_share([*whole[:2], record(2, 1900, 300)]) == 0.5
    assert whole_share([record(0, 1000, 0), record(1, 1500, 992, "http-503: busy")]) == 0.0


def test_failed_requests_are_counted_and_named_and_their_times_left_out() -> None:
    served = {"vllm:request_success": 3.0, "vllm:num_preemptions": 0.0}
    engines = [served, dict.fromkeys(served, 0.0)]
    run = Run("heavy", 1, "ours", "", 10.0, 2.0, 300.0, [record(0, 1000, 200), record(1, 9, 0, "http-503")], engines)

    found = figures(run)

    assert (found["requests"], found["failed"], found["ttft_p99_ms"]) == (2, 1, 50.0)
    assert (found["reused_share"], found["most_to_mean"], found["cpu_cores"]) == (0.2, 2.0, 0.2)
    assert "http-503" in markdown([found], "ours 0.1.0")


def test_every_router_comes_first_once_and_engines_with_less_cache_last() -> None:
    options = parsed(
        ["--rehearse", "--levels", "eviction,heavy", "--seeds", "1,2", "--disturb", "heavy", "--output", "out"]
    )

    found = plans(options, ["ours", "smg"])

    assert [each.level for each in found] == ["heavy"] * 8 + ["eviction"] * 4
    assert [each.router for each in found[:4]] == ["ours", "smg", "smg", "ours"]
    assert [each.disturbance for each in found[4:8]] == [RESTART, RESTART, KILL, KILL]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --rehearse, or --serve and --model"),
        (["--rehearse", "--levels", "calm"], "there is no level 'calm'"),
        (["--rehearse", "--routers", "nginx"], "there is no router 'nginx'"),
        (
            ["--rehearse", "--disturbances", "flood"],
            "there is no disturbance 'flood', allowed are restart, kill, attach",
        ),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed([*arguments, "--output", "out"])

    assert ended.value.code == 2
    assert words in capsys.readouterr().err
