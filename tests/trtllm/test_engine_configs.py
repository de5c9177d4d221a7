"""Every engine configuration of the repository is what TensorRT-LLM 1.2.1 accepts, and pairs fit together."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from poolgrid.plugins.trtllm.arguments.contract import ContractError, contract
from poolgrid.plugins.trtllm.arguments.engine_arguments import Layer, resolve, resolve_files
from poolgrid.plugins.trtllm.arguments.engine_config import (
    check_arguments,
    check_command,
    check_files,
    check_report,
    mode_of,
    pairs,
    read_yaml,
)
from poolgrid.plugins.trtllm.arguments.engine_rules import check_pair, graph_batch_sizes
from poolgrid.plugins.trtllm.settings import TrtllmSettings
from tests.cases import for_each
from tests.fakes.tensorrt_llm.llmapi.llm_args import CudaGraphConfig, TorchLlmArgs

CONFIGS = Path(__file__).parents[2] / "engine_configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
PAIRS = pairs(FILES)


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    else:
        yield path, value


LEAVES = [(file, path) for file in FILES for path, _ in leaves(read_yaml(file))]


def test_all_configurations_that_were_asked_for_are_there() -> None:
    assert [name(each) for each in FILES] == [
        "deepseek-r1/agg.yaml",
        *(f"deepseek-r1/{kind}/{side}.yaml" for kind in ("mtp", "simple", "wide_ep") for side in ("decode", "prefill")),
        "gemma3/decode.yaml",
        "gemma3/prefill.yaml",
        "gpt-oss-120b/blackwell/decode.yaml",
        "gpt-oss-120b/blackwell/prefill.yaml",
        "gpt-oss-120b/decode.yaml",
        "gpt-oss-120b/prefill.yaml",
        "llama4-maverick-eagle/decode.yaml",
        "llama4-maverick-eagle/prefill.yaml",
        *(f"llama4-scout/{side}.yaml" for side in ("agg", "decode", "prefill")),
        *(f"llava-v1.6-mistral-7b-hf/{side}.yaml" for side in ("decode", "encode", "prefill")),
        *(f"qwen2.5-vl/{side}.yaml" for side in ("agg", "decode", "encode", "prefill")),
        *(f"qwen3/{side}.yaml" for side in ("agg", "decode", "prefill")),
    ]
    assert len(PAIRS) == 11


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_configuration_is_what_the_contract_accepts(file: Path) -> None:
    arguments = read_yaml(file)
    assert mode_of(file.stem) is not None
    assert check_arguments(arguments, mode_of(file.stem)) == []
    TorchLlmArgs(model="m", **arguments)  # the second opinion: pydantic, over the contract itself


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_configuration_makes_a_run_in_its_mode(file: Path) -> None:
    mode = mode_of(file.stem)
    assert mode is not None
    chosen = TrtllmSettings(
        model_path="m", disaggregation_mode=mode, modality="multimodal" if mode == "encode" else "text"
    )
    made = resolve(chosen, Layer(str(file), read_yaml(file)))
    TorchLlmArgs(**made.values)
    # Only what publishing needs may be undone.
    assert all("enable_block_reuse" in each or "event_buffer" in each for each in made.warnings), made.warnings


@pytest.mark.parametrize("script", sorted((CONFIGS.parent / "launch").glob("*multimodal*.sh")), ids=str)
def test_no_launch_script_takes_images_with_block_reuse(script: Path) -> None:
    text = script.read_text() + (CONFIGS.parent / "launch" / "epd.sh").read_text()
    folders = set(re.findall(r"\$configs/([\w.-]+)", text))
    assert folders, script
    for folder in folders:
        for file in (CONFIGS / folder).glob("*.yaml"):
            if file.stem != "encode":
                assert read_yaml(file)["kv_cache_config"]["enable_block_reuse"] is False, file


def test_images_with_block_reuse_are_warned_of() -> None:
    for reuse in (True, False):
        file = Layer("f", {"kv_cache_config": {"enable_block_reuse": reuse}})
        warnings = resolve(TrtllmSettings(model_path="m", modality="multimodal"), file).warnings
        assert any("two images" in each for each in warnings) is reuse


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=name)
def test_a_pair_fits_together(prefill: Path, decode: Path) -> None:
    assert check_pair(read_yaml(prefill), read_yaml(decode)) == []


@pytest.mark.parametrize("file", FILES, ids=name)
def test_each_configuration_says_why(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert text.isascii()


def test_the_readme_explains_every_parameter_and_names_every_file() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    for file in FILES:
        assert name(file.parent) in text, file
        for path, _ in leaves(read_yaml(file)):
            assert f"`{'.'.join(map(str, path))}`" in text, f"{name(file)}: {path} is not explained"


# mutations


def changed(arguments: dict[str, Any], path: tuple[Any, ...], key: Any = None, value: Any = None) -> dict[str, Any]:
    """A copy with one key renamed, or one value replaced."""
    made = copy.deepcopy(arguments)
    holder = made
    for each in path[:-1]:
        holder = holder[each]
    if key is not None:
        holder[key] = holder.pop(path[-1])
    else:
        holder[path[-1]] = value
    return made


def wrong_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "maybe"
    if isinstance(value, int | float):
        return "many"
    if isinstance(value, str):
        return 3
    return {"a": 1}


@for_each("file, path", LEAVES)
def test_a_wrong_key_or_type_anywhere_is_found_at_its_path(file: Path, path: tuple[Any, ...]) -> None:
    arguments = read_yaml(file)
    value: Any = arguments
    for each in path:
        value = value[each]
    where = ".".join(map(str, path))
    faults = check_arguments(changed(arguments, path, value=wrong_value(value)), mode_of(file.stem))
    if path[-1] != "layer_updates_per_iter":  # the one argument whose type nobody could read
        assert any(fault.path == where for fault in faults), faults
    misspelled = f"{path[-1]}_"
    faults = check_arguments(changed(arguments, path, key=misspelled), mode_of(file.stem))
    found = [fault for fault in faults if fault.path == f"{where}_"]
    if path[-1] == "decoding_type":
        assert any(fault.path == where for fault in faults)
    else:
        assert found, faults
        assert str(path[-1]) in found[0].message


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(FILES), st.text("abcdefghij_", min_size=1, max_size=12), st.data())
def test_an_invented_key_anywhere_is_found(file: Path, key: str, data: st.DataObject) -> None:
    arguments = read_yaml(file)
    sections = [(), *((each,) for each, value in arguments.items() if isinstance(value, dict))]
    path = data.draw(st.sampled_from(sections))
    made = changed({"": arguments}, ("", *path, key), value=1)[""]
    where = ".".join((*path, key))
    faults = contract().check(made)
    assert any(fault.path == where for fault in faults) or where in contract().fields


PREFILL = read_yaml(CONFIGS / "deepseek-r1" / "simple" / "prefill.yaml")
DECODE = read_yaml(CONFIGS / "deepseek-r1" / "simple" / "decode.yaml")


@pytest.mark.parametrize(
    ("side", "path", "value", "where"),
    [
        ("decode", ("kv_cache_config", "dtype"), "auto", "decode.kv_cache_config.dtype"),
        ("decode", ("kv_cache_config", "tokens_per_block"), 64, "decode.kv_cache_config.tokens_per_block"),
        ("decode", ("kv_cache_config", "max_attention_window"), [512], "decode.kv_cache_config.max_attention_window"),
        ("decode", ("cache_transceiver_config", "backend"), "NIXL", "decode.cache_transceiver_config.backend"),
        ("decode", ("cache_transceiver_config",), None, "decode.cache_transceiver_config.backend"),
        ("prefill", ("cache_transceiver_config",), None, "prefill.cache_transceiver_config.backend"),
        ("prefill", ("disable_overlap_scheduler",), False, "prefill.disable_overlap_scheduler"),
        (
            "prefill",
            ("cache_transceiver_config", "max_tokens_in_buffer"),
            8191,
            "prefill.cache_transceiver_config.max_tokens_in_buffer",
        ),
        (
            "decode",
            ("cache_transceiver_config", "max_tokens_in_buffer"),
            8191,
            "decode.cache_transceiver_config.max_tokens_in_buffer",
        ),
        (
            "decode",
            ("cache_transceiver_config", "max_tokens_in_buffer"),
            None,
            "decode.cache_transceiver_config.max_tokens_in_buffer",
        ),
        ("decode", ("max_num_tokens",), 255, "decode.max_num_tokens"),
        ("decode", ("max_seq_len",), 8192, "decode.max_seq_len"),
        ("decode", ("max_beam_width",), 2, "decode.max_beam_width"),
        ("prefill", ("pipeline_parallel_size",), 2, None),
        ("decode", ("speculative_config",), {"decoding_type": "MTP"}, "decode.speculative_config"),
    ],
)
def test_a_pair_that_does_not_fit_is_found(side: str, path: tuple[str, ...], value: Any, where: str | None) -> None:
    both = {"prefill": PREFILL, "decode": DECODE}
    both[side] = changed(both[side], path, value=value)
    found = [fault.path for fault in check_pair(both["prefill"], both["decode"])]
    assert (where in found) if where else not found


@pytest.mark.parametrize(
    ("decode", "warned"),
    [
        ({"max_seq_len": 8192}, ["max_seq_len"]),
        ({"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 1}}, ["max_tokens_in_buffer"]),
        ({"cache_transceiver_config": {"backend": "UCX"}}, ["max_tokens_in_buffer"]),
        ({"max_seq_len": 8191}, None),
    ],
)
def test_a_pair_that_runs_with_limits_gets_warnings_and_status_0(
    tmp_path: Path, decode: dict[str, Any], warned: list[str] | None
) -> None:
    (tmp_path / "prefill.yaml").write_text(yaml.safe_dump(PREFILL))
    (tmp_path / "decode.yaml").write_text(yaml.safe_dump({**DECODE, **decode}))
    text, status = check_command([tmp_path])
    report, report_status = check_report([tmp_path])
    found = report["files"][str(tmp_path / "decode.yaml")]
    if warned is None:
        assert (status, report_status) == (1, 1)
        assert not any(each["warning"] for each in found)
        return
    assert (status, report_status) == (0, 0)
    assert [each["path"].rpartition(".")[2] for each in found if each["warning"]] == warned
    assert text.count("decode.yaml: warning: ") == 1
    assert text.endswith("0 with faults\n")


@pytest.mark.parametrize(
    ("directory", "tokens"), [("deepseek-r1/simple", 256), ("deepseek-r1/mtp", 512), ("llama4-maverick-eagle", 1024)]
)
def test_a_decode_step_has_room_for_the_drafts_of_a_whole_batch(directory: str, tokens: int) -> None:
    left, right = (read_yaml(CONFIGS / directory / f"{side}.yaml") for side in ("prefill", "decode"))
    assert check_pair(left, {**right, "max_num_tokens": tokens}) == []
    faults = check_pair(left, {**right, "max_num_tokens": tokens - 1})
    assert [str(fault).partition(":")[0] for fault in faults] == ["decode.max_num_tokens"]
    assert f"integers from {tokens}" in faults[0].message


MTP = {"decoding_type": "MTP", "max_draft_len": 2}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size"]),
        ({"speculative_config": {**MTP, "draft_len_schedule": {1: 3}}}, ["speculative_config.draft_len_schedule"]),
        ({"speculative_config": {**MTP, "draft_len_schedule": {1: 2, 8: 1}}}, []),
        ({"moe_config": {"load_balancer": {"num_slots": 287}}}, ["moe_config.load_balancer.num_slots"]),
        ({"moe_config": {"load_balancer": {"num_slots": 288}}}, []),
    ],
)
def test_fields_that_depend_on_each_other_are_checked_together(change: dict[str, Any], expected: list[str]) -> None:
    arguments = {**read_yaml(CONFIGS / "deepseek-r1" / "mtp" / "decode.yaml"), **change}
    assert [fault.path for fault in check_arguments(arguments, "prefill_and_decode")] == expected


def test_a_prefill_engine_without_a_longest_prompt_cannot_size_its_buffer() -> None:
    left = changed(PREFILL, ("max_seq_len",), value=None) | {"enable_chunked_prefill": True}
    assert [fault.path for fault in check_pair(left, DECODE)] == ["prefill.max_seq_len"]


@given(st.integers(1, 3000), st.booleans())
def test_graph_batches_agree_with_the_contract_models(maximum: int, padding: bool) -> None:
    sizes = graph_batch_sizes(maximum, padding)
    assert sizes[-1] == maximum
    assert sizes == sorted(set(sizes))
    CudaGraphConfig(batch_sizes=sizes, max_batch_size=maximum, enable_padding=padding)


# the command


def test_the_check_command_tells_every_fault_with_file_and_path(tmp_path: Path) -> None:
    (tmp_path / "prefill.yaml").write_text(yaml.safe_dump(changed(PREFILL, ("kv_cache_config", "dtype"), value="auto")))
    (tmp_path / "decode.yaml").write_text(yaml.safe_dump(DECODE))
    (tmp_path / "agg.yaml").write_text("max_batchsize: 1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    text, status = check_command([tmp_path])
    assert status == 1
    assert f'{tmp_path / "decode.yaml"}: kv_cache_config.dtype: is "fp8", the prefill side has "auto"' in text
    assert f"{tmp_path / 'agg.yaml'}: max_batchsize: is not a known argument" in text
    assert "broken.yaml" in text
    assert text.splitlines()[-1] == "4 files checked against TensorRT-LLM 1.2.1 to 1.4.0rc4, 3 with faults"
    text, status = check_command([CONFIGS])
    assert (status, text) == (0, f"{len(FILES)} files checked against TensorRT-LLM 1.2.1 to 1.4.0rc4, 0 with faults\n")
    assert check_command([tmp_path / "none"]) == (
        f"{tmp_path / 'none'}: reading engine arguments: {tmp_path / 'none'}: No such file or directory\n"
        "1 file checked against TensorRT-LLM 1.2.1 to 1.4.0rc4, 1 with faults\n",
        1,
    )
    assert check_files([tmp_path, tmp_path])[0] == check_files([tmp_path])[0]
    report, status = check_report([tmp_path])
    assert status == 1
    found = {Path(file).name: [fault["path"] for fault in faults] for file, faults in report["files"].items()}
    assert found["prefill.yaml"] == []
    assert found["decode.yaml"] == ["kv_cache_config.dtype"]
    assert found["agg.yaml"] == ["max_batchsize"]
    assert found["broken.yaml"] == [""]
    assert check_report([tmp_path / "empty"])[1] == 1


def test_a_file_for_encoding_is_checked_against_the_model_that_it_is_for(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text('{"architectures": ["Llama4ForConditionalGeneration"]}')
    (tmp_path / "encode.yaml").write_text("max_batch_size: 8\n")
    (tmp_path / "agg.yaml").write_text("max_batch_size: 8\n")
    assert check_command([tmp_path])[1] == 0
    text, status = check_command([tmp_path], str(model))
    assert status == 1
    assert f'encode.yaml: model: is "{model}'[:60] in text
    assert "cannot run the vision part of Llama4" in text
    assert "agg.yaml" not in text
    (tmp_path / "encode.yaml").write_text(f"model: {model}\n")
    assert check_report([tmp_path])[1] == 1


def test_the_file_of_an_expert_load_balancer_is_looked_for_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wide = {"moe_config": {"backend": "WIDEEP", "load_balancer": "eplb.yaml"}, "moe_expert_parallel_size": 16}
    (tmp_path / "agg.yaml").write_text(yaml.safe_dump(wide))

    def found() -> str:
        text, status = check_command([tmp_path / "agg.yaml"])
        assert status == ("0 with faults" not in text)
        return text.splitlines()[0]

    assert 'moe_config.load_balancer: is "eplb.yaml", which cannot be used' in found()
    assert "No such file" in found()
    assert str(tmp_path) in found()
    (tmp_path / "eplb.yaml").write_text("num_slots: 287\n")
    assert "num_slots: is 287, allowed are multiples of moe_expert_parallel_size (16) (in eplb.yaml)" in found()
    (tmp_path / "eplb.yaml").write_text("slots: 288\n")
    assert "moe_config.load_balancer.slots: is not a known argument" in found()
    (tmp_path / "eplb.yaml").write_text("num_slots: 288\n")
    assert "0 with faults" in found()

    settings = TrtllmSettings(model_path="m", extra_engine_args=tmp_path / "agg.yaml")
    assert not any("WIDEEP" in each for each in resolve_files(settings).warnings)
    (tmp_path / "eplb.yaml").unlink()
    with pytest.raises(ContractError, match=r"eplb\.yaml.*cannot be used.*agg\.yaml"):
        resolve_files(settings)
    (tmp_path / "agg.yaml").write_text(yaml.safe_dump({"moe_config": {"backend": "WIDEEP"}}))
    assert any("WIDEEP without moe_config.load_balancer" in each for each in resolve_files(settings).warnings)


@pytest.mark.parametrize(
    ("stem", "mode"),
    [
        ("agg", "prefill_and_decode"),
        ("vswa_prefill", "prefill"),
        ("llama4-decode", "decode"),
        ("encode", "encode"),
        ("prefill_decode", None),
        ("engine", None),
    ],
)
def test_a_file_name_tells_the_mode(stem: str, mode: str | None) -> None:
    assert mode_of(stem) == mode


# LLaVA's template


def render(messages: list[dict[str, Any]]) -> str:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    source = (CONFIGS / "llava-v1.6-mistral-7b-hf" / "template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render(messages=messages, add_generation_prompt=True, bos_token="<s>")


IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "hi"}], "[INST] hi [/INST]"),
        ([{"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE]}], "[INST] <image>\nwhat? [/INST]"),
        (
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [IMAGE, {"type": "text", "text": "x"}]},
            ],
            "[INST] <image>\nbe brief\n\nx [/INST]",
        ),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
            ],
            "[INST] a [/INST] b</s>[INST] c [/INST]",
        ),
    ],
)
def test_llavas_template_puts_images_before_the_text(messages: list[dict[str, Any]], expected: str) -> None:
    assert render(messages) == expected


def test_llavas_template_refuses_roles_out_of_order() -> None:
    with pytest.raises(TemplateError, match="alternate"):
        render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


def test_no_parameter_is_spelled_in_two_ways() -> None:
    keys = {path[-1] for file in FILES for path, _ in leaves(read_yaml(file))}
    assert all(re.fullmatch(r"[a-z0-9_]+", str(key)) for key in keys)
