"""Settings are checked before anything is built, and every wrong one is told in a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from minivllm.cache.block_hash import SHA256, WeakHash, Xxh3
from minivllm.cache.eviction.lru import LRU
from minivllm.cache.eviction.mru import MRU
from minivllm.cache.prefix_index.hash_map import HashMapIndex
from minivllm.cache.publication import AT_ALLOCATION, INCREMENTAL, ON_COMPLETION
from minivllm.config import EngineConfig, policy_name
from minivllm.coordination.coordinator import IndependentCoordinator
from minivllm.coordination.release import ReleaseOnCompletion
from minivllm.coordination.shared_prefix import SharedPrefixCoordinator
from minivllm.coordination.single_flight import PrefixCacheFlightCoordinator
from minivllm.coordination.wait_or_recompute import WaitOrRecompute
from minivllm.cost import CostModel
from minivllm.errors import ConfigError, MiniVLLMError, UnknownNameError, nearest
from minivllm.scheduling.policies import WHOLE_PROMPT, PriorityFirst

POLICIES = ("publication", "coordination", "release", "eviction", "prefix_index", "block_hash", "scheduling")


def build(name: str, value: Any) -> EngineConfig:
    return EngineConfig(**{name: value})


def test_the_defaults_are_those_of_a_small_machine() -> None:
    config = EngineConfig()
    assert (config.block_size, config.num_blocks) == (16, 512)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (2048, 8)
    assert config.publication_policy is ON_COMPLETION
    assert config.coordination_policy is IndependentCoordinator
    assert (config.block_hash_policy.name, config.scheduling_policy.name) == ("sha256", "fcfs")
    assert (config.admission, config.num_reserved_blocks, config.adoption) == ("by-chunk", 0, False)
    assert (config.allow_unsafe, config.check_token_ids, config.cost, config.ttft_target_ms) == ("", False, None, None)


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "16", None, True, 1 << 40])
def test_a_size_that_makes_no_sense_is_refused_with_its_limits(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .* whole number from 1 to"):
        build(name, value)


def test_every_size_may_be_1_and_a_threshold_may_be_0() -> None:
    config = EngineConfig(block_size=1, num_blocks=1, max_num_batched_tokens=1, max_num_seqs=1)
    assert config.long_prefill_token_threshold == 0
    with pytest.raises(ConfigError, match=r"long_prefill_token_threshold is -1; .* from 0"):
        EngineConfig(long_prefill_token_threshold=-1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"is called 'nonsense'; (choose one of|did you mean)"):
        build(name, "nonsense")


@pytest.mark.parametrize(
    ("name", "given", "near"),
    [
        ("publication", "incremetal", "incremental"),
        ("coordination", "single-fligth", "single-flight"),
        ("release", "after-prefil", "after-prefill"),
        ("eviction", "lur", "lru"),
        ("prefix_index", "hashmap", "hash-map"),
        ("block_hash", "sha-256", "sha256"),
        ("block_hash", "xxh3", "xxh3-128"),
        ("scheduling", "prio", "priority"),
        ("coordination", "shared-prefixes", "shared-prefix"),
        ("coordination", "wait-and-recompute", "wait-or-recompute"),
        ("publication", "at-alocation", "at-allocation"),
    ],
)
def test_a_misspelt_policy_is_told_the_nearest_name(name: str, given: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{given}'; did you mean '{near}'"):
        build(name, given)


def test_names_are_understood_as_they_are_written_in_code() -> None:
    config = EngineConfig(publication="ON_COMPLETION", coordination="SINGLE_FLIGHT", release="On-Completion")
    assert config.publication_policy is ON_COMPLETION
    assert config.coordination_policy is PrefixCacheFlightCoordinator
    other = EngineConfig(
        coordination="SHARED_PREFIX", block_hash="SHA256", scheduling="PRIORITY", prefix_index="HASH_MAP"
    )
    assert other.coordination_policy is SharedPrefixCoordinator
    assert (other.block_hash_policy.name, other.scheduling_policy.name) == ("sha256", "priority")
    assert EngineConfig(admission="WHOLE_PROMPT").admission == WHOLE_PROMPT


def test_a_policy_may_be_an_object_or_a_class_where_each_engine_makes_its_own() -> None:
    config = EngineConfig(
        publication=INCREMENTAL,
        coordination=PrefixCacheFlightCoordinator,
        release=ReleaseOnCompletion(),
        eviction=MRU(),
        prefix_index=HashMapIndex,
        block_hash=SHA256,
        scheduling=PriorityFirst(),
    )
    assert config.publication_policy is INCREMENTAL
    assert config.coordination_policy is PrefixCacheFlightCoordinator
    assert config.prefix_index_policy is HashMapIndex
    assert config.block_hash_policy is SHA256
    assert config.scheduling_policy is config.scheduling


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("value", [None, 7, object()])
def test_what_is_no_policy_is_refused_with_what_it_lacks(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"it has no .*\(\); pass one of"):
        build(name, value)


@pytest.mark.parametrize("name", ["publication", "release", "eviction", "block_hash", "scheduling"])
def test_a_class_where_an_object_is_meant_is_refused_at_once(name: str) -> None:
    """Else the first step would fail, far from the mistake."""
    classes: dict[str, type] = {
        "publication": type(INCREMENTAL),
        "release": ReleaseOnCompletion,
        "eviction": LRU,
        "block_hash": Xxh3,
        "scheduling": PriorityFirst,
    }
    with pytest.raises(ConfigError, match=r"is a class; pass an object of it, .*\(\)"):
        build(name, classes[name])


@pytest.mark.parametrize("name", ["coordination", "prefix_index"])
def test_an_object_where_a_class_is_meant_is_refused_at_once(name: str) -> None:
    objects: dict[str, object] = {
        "coordination": IndependentCoordinator(ReleaseOnCompletion(), lambda event: None),
        "prefix_index": HashMapIndex(),
    }
    with pytest.raises(ConfigError, match="is an object; pass its class, as each engine makes its own"):
        build(name, objects[name])


def test_a_changed_copy_is_checked_and_the_original_stays() -> None:
    config = EngineConfig()
    assert config.replace(num_blocks=8).num_blocks == 8
    assert config.num_blocks == 512
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        config.replace(num_blocks=0)
    with pytest.raises(UnknownNameError, match="no setting is called 'block_sise'; did you mean 'block_size'"):
        config.replace(block_sise=4)


def test_settings_as_plain_values_can_be_written_as_json_and_read_back() -> None:
    config = EngineConfig(publication=INCREMENTAL, coordination=PrefixCacheFlightCoordinator, eviction=MRU())
    data = json.loads(json.dumps(config.as_dict()))
    assert (data["publication"], data["coordination"], data["eviction"]) == ("incremental", "single-flight", "mru")
    assert EngineConfig(**data).as_dict() == data


def test_every_setting_is_written_as_a_plain_value_and_policies_by_name() -> None:
    config = EngineConfig(
        publication=AT_ALLOCATION,
        coordination=WaitOrRecompute.choosing(ttft_target_ms=5),
        block_hash=WeakHash(6),
        scheduling=PriorityFirst(),
        cost=CostModel(step_ms=1.5),
        ttft_target_ms=200,
        watermark=0.25,
        admission="whole-prompt",
        adoption=True,
        check_token_ids=True,
        allow_unsafe="at-allocation",
    )
    data = json.loads(json.dumps(config.as_dict()))
    assert list(data) == list(EngineConfig.__dataclass_fields__)
    assert (data["publication"], data["coordination"]) == ("at-allocation", "wait-or-recompute")
    assert (data["block_hash"], data["scheduling"], data["admission"]) == ("weak-6", "priority", "whole-prompt")
    assert data["cost"] == {
        "step_ms": 1.5,
        "prefill_ms": 1.05,
        "decode_one_ms": 0.1,
        "decode_base_ms": 5.0,
        "decode_row_ms": 5.4,
    }
    assert (data["ttft_target_ms"], data["watermark"]) == (200, 0.25)
    assert (data["adoption"], data["check_token_ids"], data["allow_unsafe"]) == (True, True, "at-allocation")
    assert EngineConfig().as_dict()["cost"] is None


# -- Settings that are numbers, or choices of two ----------------------------------------------------------


@pytest.mark.parametrize("value", [-0.01, 0.91, 1, math.nan, math.inf, "0.1", None, True])
def test_a_watermark_is_a_share_of_the_pool_that_leaves_room(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build("watermark", value)
    assert str(caught.value) == (
        f"watermark is {value!r}; it must be a number from 0 to 0.9 (a share of the pool, such as 0.05)"
    )


def test_the_watermark_in_blocks_is_rounded_down() -> None:
    counts = [EngineConfig(watermark=share, num_blocks=10).num_reserved_blocks for share in (0, 0.09, 0.1, 0.25, 0.9)]
    assert counts == [0, 0, 1, 2, 9]


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, "200", True])
def test_a_target_for_the_first_token_is_in_milliseconds_of_0_or_more(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build("ttft_target_ms", value)
    assert str(caught.value) == (
        f"ttft_target_ms is {value!r}; it must be a number from 0 to 1e+09 (milliseconds, such as 200, or None)"
    )


def test_a_target_of_0_or_none_is_fine() -> None:
    assert (build("ttft_target_ms", 0).ttft_target_ms, build("ttft_target_ms", None).ttft_target_ms) == (0, None)


@pytest.mark.parametrize("value", [5, {"step_ms": 1.0}, "cheap", CostModel])
def test_a_cost_is_a_cost_model(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"cost is .*; pass a CostModel\(\.\.\.\), or None for the runner's own"):
        build("cost", value)


@pytest.mark.parametrize("value", ["by-chunks", "", None, 5, ["by-chunk"]])
def test_an_admission_that_does_not_exist_is_refused(value: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"no admission is called .*; (choose one of by-chunk, whole|did you)"):
        build("admission", value)


def test_cost_and_target_reach_the_coordinator_that_predicts_and_no_other() -> None:
    cost = CostModel(step_ms=1.0)
    policy: Any = EngineConfig(coordination="wait-or-recompute", cost=cost, ttft_target_ms=7.0).coordination_policy
    assert issubclass(policy, WaitOrRecompute)
    assert (policy.cost, policy.ttft_target_ms, policy.name) == (cost, 7.0, "wait-or-recompute")
    assert (WaitOrRecompute.cost, WaitOrRecompute.ttft_target_ms) == (None, None)
    assert EngineConfig(coordination="shared-prefix", cost=cost).coordination_policy is SharedPrefixCoordinator


@pytest.mark.parametrize("value", ["at-alocation", "incremental", "on-completion", "AT_ALLOCATION", True, 1])
def test_consent_is_given_to_an_unsafe_policy_by_its_exact_name(value: Any) -> None:
    with pytest.raises(UnknownNameError) as caught:
        build("allow_unsafe", value)
    assert str(caught.value) == (f"allow_unsafe is {value!r}; it names an unsafe publication policy: at-allocation")
    assert build("allow_unsafe", "at-allocation").allow_unsafe == "at-allocation"


def test_consent_may_name_an_unsafe_policy_of_ones_own() -> None:
    class Mine:
        name = "mine"
        is_safe = False

        def visible_tokens(self, num_computed_tokens: int, moment: Any) -> int:
            return num_computed_tokens

    assert EngineConfig(publication=Mine(), allow_unsafe="mine").allow_unsafe == "mine"
    with pytest.raises(UnknownNameError, match="allow_unsafe is 'mine'"):
        EngineConfig(allow_unsafe="mine")


def test_a_policy_without_a_name_is_called_after_its_class() -> None:
    class Mine:
        def place(self, freed: Any) -> Any:
            raise NotImplementedError

    assert policy_name("lru") == "lru"
    assert policy_name(LRU()) == "lru"
    assert policy_name(Mine()) == policy_name(Mine) == "Mine"
    assert EngineConfig(eviction=Mine()).as_dict()["eviction"] == "Mine"  # type: ignore[arg-type]


def test_every_error_is_of_one_tree_and_of_a_builtin_kind() -> None:
    assert issubclass(ConfigError, MiniVLLMError) and issubclass(ConfigError, ValueError)
    assert issubclass(UnknownNameError, MiniVLLMError) and issubclass(UnknownNameError, ValueError)


def test_the_hint_names_the_nearest_or_lists_all() -> None:
    assert nearest("smolm2", ["smollm2", "tiny"]) == "did you mean 'smollm2'?"
    assert nearest("zzz", ["smollm2", "tiny"]) == "choose one of smollm2, tiny"
    assert nearest(None, ["smollm2"]) == "choose one of smollm2"


@pytest.mark.parametrize(("watermark", "num_blocks", "reserved"), [(0.29, 100, 29), (0.57, 100, 57), (0.05, 512, 25)])
def test_a_watermark_reserves_its_share_whatever_floating_point_makes_of_it(
    watermark: float, num_blocks: int, reserved: int
) -> None:
    assert EngineConfig(watermark=watermark, num_blocks=num_blocks).num_reserved_blocks == reserved
