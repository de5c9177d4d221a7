"""Arguments are checked by the source of the version that is installed, without importing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from poolgrid.plugins.trtllm.arguments import contract as contracts
from poolgrid.plugins.trtllm.arguments.installed import read_facts
from tests.fakes import tensorrt_llm_of

SOURCE = """
class StrictBaseModel(BaseModel): ...
class Policy(StrEnum):
    FCFS = "fcfs"
class Nested(StrictBaseModel):
    steps: PositiveInt = Field(default=1)
Union_: TypeAlias = Annotated[Union[A, B], Field(discriminator="kind")]
class KvCacheConfig(StrictBaseModel, PybindMirror):
    fraction: Optional[float] = Field(default=0.9, gt=0, le=1)
    sizes: Optional[List[int]] = Field(default=None, min_length=1)
    nested: Nested = Field(default_factory=Nested)
    mode: bool | Literal["auto"] = Field(default="auto")
class BaseLlmArgs(StrictBaseModel):
    model: Union[str, Path] = Field(description="where it is")
    policy: Policy = Field(default=Policy.FCFS)
    cache: Optional["KvCacheConfig"] = None
    session: Optional[object] = Field(default=None, alias="_session")
    _hidden: int = PrivateAttr(default=0)
def _check(value): ...
def _check_sampler(value):
    "Some values meant what there is now."
    if value in ("auto", "TorchSampler"):
        logger.warning("ignored")
        return
    raise ValueError("removed")
_REMOVED_ARG_CHECKS: Dict[str, Any] = {"old": _check, "sampler": _check_sampler}
class TorchLlmArgs(BaseLlmArgs):
    speculative: Optional[Union_] = Field(default=None)
    shaped: Dict[str, str] = Field(default_factory=dict)
    count: int
    LIMIT: ClassVar[int] = 3

    @field_validator("shaped", mode="before")
    @classmethod
    def _shape(cls, v): ...
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "llmapi").mkdir()
    (tmp_path / "llmapi" / "llm_args.py").write_text(SOURCE)
    (tmp_path / "version.py").write_text('__version__ = "1.4.0rc4"\n')
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    contracts.installed_contract.cache_clear()
    yield
    contracts.installed_contract.cache_clear()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"model": "m", "count": 1, "policy": "fcfs", "old": 1, "_session": None, "speculative": {"x": 1}}, ""),
        ({"cache": {"fraction": 1.0, "sizes": [1], "nested": {"steps": 2}, "mode": "auto"}, "shaped": 5}, ""),
        ({"cache": None}, ""),
        ({"cache": {"fraction": 0.0}}, "cache.fraction: is 0.0, allowed is a value greater than 0"),
        ({"cache": {"fraction": 1.5}}, "cache.fraction: is 1.5, allowed is a value less than or equal to 1"),
        ({"cache": {"sizes": []}}, "cache.sizes: is [], allowed is a list with at least one entry"),
        ({"cache": {"nested": {"steps": 0}}}, "cache.nested.steps: is 0, allowed is a value greater than 0"),
        ({"cache": {"nested": {"step": 1}}}, "cache.nested.step: is not a known argument; did you mean 'steps'?"),
        ({"policy": "sjf"}, "policy: is \"sjf\", allowed is 'fcfs'"),
        ({"sampler": "TorchSampler"}, ""),
        (
            {"sampler": "TRTLLMSampler"},
            "sampler: is \"TRTLLMSampler\", allowed is 'auto' or 'TorchSampler'; did you mean 'TorchSampler'?",
        ),
        ({"LIMIT": 3}, "LIMIT: is not a known argument"),
        ({"_hidden": 3}, "_hidden: is not a known argument"),
        ({"max_batch_size": 3}, "max_batch_size: is no argument of TensorRT-LLM 1.4.0rc4; 1.2.1 had it"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_the_installed_version_has_passes_and_what_it_has_not_is_a_fault(
    given: dict[str, object], fault: str
) -> None:
    checked = contracts.installed_contract()
    assert checked.version == "1.4.0rc4"
    assert "; ".join(map(str, checked.check(given))) == fault


def test_a_package_without_readable_arguments_is_checked_by_the_facts_of_1_2_1() -> None:
    assert read_facts("class Other: ...", "1.4.0") is None
    assert contracts.installed_contract() is contracts.contract()


@pytest.mark.parametrize(
    "given",
    [
        {
            "kv_cache_config": {
                "disk_cache_size": 1,
                "disk_cache_path": "/d",
                "block_reuse_config": {"policy": "per_request"},
            }
        },
        {"kv_cache_config": {"host_cache_bind_to_gpu_numa_node": True, "mamba_state_config": {}}},
        {"scheduler_config": {"waiting_queue_policy": "priority"}, "encode_only": False},
        {"attention_dp_config": {"enable_kv_cache_aware_routing": True}},
        {"cache_transceiver_config": {"transceiver_runtime": "PYTHON"}},
    ],
)
def test_arguments_of_later_versions_pass_where_nothing_is_installed(given: dict[str, object]) -> None:
    assert not contracts.contract().check(given)


def test_the_fake_of_1_4_has_its_arguments() -> None:
    with tensorrt_llm_of("1.4") as package:
        package.llmapi.KvCacheConfig(disk_cache_size=1, block_reuse_config={"policy": "per_conversation"})
        with pytest.raises(ValueError, match="onboard_blocks"):
            package.llmapi.KvCacheConfig(onboard_blocks=True)
