"""Settings are checked before anything is built, and every wrong one is told in a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minivllm.config import EngineConfig, policy_name
from minivllm.errors import ConfigError, MiniVLLMError, UnknownNameError, nearest
from minivllm.eviction import LRU, MRU
from minivllm.flights import IndependentCoordinator, PrefixCacheFlightCoordinator, ReleaseOnCompletion
from minivllm.prefix_index import HashMapIndex
from minivllm.publication import INCREMENTAL, ON_COMPLETION

POLICIES = ("publication", "coordination", "release", "eviction", "prefix_index")


def build(name: str, value: Any) -> EngineConfig:
    return EngineConfig(**{name: value})


def test_the_defaults_are_those_of_a_small_machine() -> None:
    config = EngineConfig()
    assert (config.block_size, config.num_blocks) == (16, 512)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (2048, 8)
    assert config.publication_policy is ON_COMPLETION
    assert config.coordination_policy is IndependentCoordinator


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
    ],
)
def test_a_misspelt_policy_is_told_the_nearest_name(name: str, given: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{given}'; did you mean '{near}'"):
        build(name, given)


def test_names_are_understood_as_they_are_written_in_code() -> None:
    config = EngineConfig(publication="ON_COMPLETION", coordination="SINGLE_FLIGHT", release="On-Completion")
    assert config.publication_policy is ON_COMPLETION
    assert config.coordination_policy is PrefixCacheFlightCoordinator


def test_a_policy_may_be_an_object_or_a_class_where_each_engine_makes_its_own() -> None:
    config = EngineConfig(
        publication=INCREMENTAL,
        coordination=PrefixCacheFlightCoordinator,
        release=ReleaseOnCompletion(),
        eviction=MRU(),
        prefix_index=HashMapIndex,
    )
    assert config.publication_policy is INCREMENTAL
    assert config.coordination_policy is PrefixCacheFlightCoordinator
    assert config.prefix_index_policy is HashMapIndex


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("value", [None, 7, object()])
def test_what_is_no_policy_is_refused_with_what_it_lacks(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"it has no .*\(\); pass one of"):
        build(name, value)


@pytest.mark.parametrize("name", ["publication", "release", "eviction"])
def test_a_class_where_an_object_is_meant_is_refused_at_once(name: str) -> None:
    """Else the first step would fail, far from the mistake."""
    classes: dict[str, type] = {"publication": type(INCREMENTAL), "release": ReleaseOnCompletion, "eviction": LRU}
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
