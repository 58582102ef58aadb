"""Input checks of samples, adapters, multimodal items and priorities: refused in one sentence, with nothing changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from minivllm import Engine, EngineConfig, EngineCore, MultimodalItem, Sampling, Submission, VirtualRunner
from minivllm.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    MiniVLLMError,
    UnknownRequestError,
)
from minivllm.log import events as ev
from tests.unit.small import FULL_PROMPT, check, events_of, run

TWO = Sampling(max_tokens=1, n=2)

ITEM = MultimodalItem("a cat", 2, 3)
"""Tokens 2, 3 and 4."""


def core_with(adapters: tuple[str, ...] | None = None, **settings: Any) -> EngineCore:
    """Return an engine over a virtual model that has these adapters (None: any)."""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 32, **settings})
    return EngineCore(config, VirtualRunner(adapters=adapters))


def is_refused(core: EngineCore, error: type[MiniVLLMError], message: str, **fields: Any) -> None:
    """Check that a submit is refused with this message in one line, and that nothing at all has changed."""
    before, events, requests = core.state(), len(core.log), dict(core.requests)
    with pytest.raises(error) as caught:
        core.submit(**{"prompt": FULL_PROMPT, "max_tokens": 1, **fields})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (core.state(), len(core.log), core.requests) == (before, events, requests)
    check(core)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"n": 9},
        "n is 9 samples, which decode side by side, and max_num_seqs is 8; ask for fewer or raise max_num_seqs",
    ),
    *(
        ({"n": n}, f"n is {n!r}; it must be a whole number of samples from 1 to 128")
        for n in (0, -1, 129, 2.0, True, None, "3")
    ),
    (
        {"n": 3, "seed": 2**64 - 2},
        "seed is 18446744073709551614 and n is 3, so the last sample's seed would be above 2**64 - 1; lower the seed",
    ),
    *(
        ({"adapter": name}, f"adapter is {name!r}; it must be the name of an adapter, or None")
        for name in ("", 5, b"law", ["law"])
    ),
    *(
        ({"priority": value}, f"priority is {value!r}; it must be a whole number, lower goes first")
        for value in (1.0, "1", None, True)
    ),
    *(
        ({"multimodal": items}, f"multimodal is {items!r}; pass a list of MultimodalItem(...)")
        for items in (None, ITEM, "a cat", {ITEM})
    ),
    ({"multimodal": [("a cat", 2, 3)]}, "multimodal holds ('a cat', 2, 3); pass MultimodalItem(hash, offset, num_to"),
    (
        {"multimodal": [MultimodalItem("a cat", 7, 3)]},
        "a multimodal item covers tokens 7 to 9, and the prompt has 9; its tokens must be in the prompt",
    ),
    ({"multimodal": [ITEM, MultimodalItem("a cat", 9, 1)]}, "covers tokens 9 to 9, and the prompt has 9"),
    (
        {"multimodal": [MultimodalItem("a dog", 4, 2), ITEM]},
        "two multimodal items cover token 4; each token stands for one of them at most",
    ),
    ({"multimodal": [ITEM, ITEM]}, "two multimodal items cover token 2"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[f"{i} {list(f)}" for i, (f, _) in enumerate(WRONG)])
@pytest.mark.parametrize("busy", [False, True], ids=["empty engine", "busy engine"])
def test_what_makes_no_sense_is_refused_in_one_sentence_and_nothing_changes(
    fields: dict[str, Any], message: str, busy: bool
) -> None:
    core = core_with(coordination="single-flight")
    if busy:
        core.submit(FULL_PROMPT, max_tokens=3, n=2)
        core.submit(FULL_PROMPT, max_tokens=3)
        core.step()
    is_refused(core, InvalidRequestError, message, **fields)
    run(core)
    assert core.submit(FULL_PROMPT, max_tokens=1).request_id == ("r2" if busy else "r0")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Submission([1], Sampling(max_tokens=1, n=9)), InvalidRequestError),
        (Submission([1], TWO, "first"), DuplicateRequestError),
        (Submission([1], Sampling(max_tokens=1), "first.1"), DuplicateRequestError),
        (Submission([1], Sampling(max_tokens=1), adapter=""), InvalidRequestError),
        (Submission([1], Sampling(max_tokens=1), multimodal=[MultimodalItem("a", 0, 2)]), InvalidRequestError),
        (Submission([1], Sampling(max_tokens=1), priority=0.5), InvalidRequestError),  # type: ignore[arg-type]
    ],
)
def test_of_a_batch_in_which_one_is_refused_no_sample_is_left(bad: Submission, error: type[MiniVLLMError]) -> None:
    core = core_with()
    before, events = core.state(), len(core.log)
    batch = [Submission(FULL_PROMPT, TWO, "first"), Submission(FULL_PROMPT, TWO), bad]
    with pytest.raises(error):
        core.submit_batch(batch)
    assert (core.state(), len(core.log), core.requests) == (before, events, {})
    with pytest.raises(UnknownRequestError):
        core.samples_of("first")
    core.submit_batch(batch[:2])
    run(core)


def test_the_limits_themselves_are_let_in() -> None:
    core = core_with()
    first = core.submit(FULL_PROMPT, max_tokens=2, n=8, seed=2**64 - 8, temperature=0.8)
    last = core.requests[core.samples_of(first.request_id)[-1]]
    assert (last.request_id, last.seed, last.sampling.n) == ("r0.7", 2**64 - 1, 1)
    core.submit(FULL_PROMPT, max_tokens=1, multimodal=[MultimodalItem("all of it", 0, 9)], priority=-(2**70))
    core.submit([1], max_tokens=1, multimodal=[])
    run(core)


# -- Names of samples --------------------------------------------------------------------------------------


def test_samples_are_named_after_the_first_and_any_of_them_names_all() -> None:
    core = core_with()
    first = core.submit(FULL_PROMPT, max_tokens=1, n=3, request_id="a")
    alone = core.submit(FULL_PROMPT, max_tokens=1)
    assert first.request_id == "a"
    assert list(core.requests) == ["a", "a.1", "a.2", "r0"]
    assert {core.samples_of(name) for name in ("a", "a.1", "a.2")} == {("a", "a.1", "a.2")}
    assert core.samples_of(alone.request_id) == ("r0",)
    with pytest.raises(UnknownRequestError, match=r"no request is called 'a\.3'"):
        core.samples_of("a.3")


@pytest.mark.parametrize("ended", [False, True], ids=["in the engine", "ended"])
def test_a_sample_whose_name_is_in_use_is_refused_and_so_are_the_others(ended: bool) -> None:
    core = core_with()
    core.submit([1], max_tokens=3, request_id="a.1")
    if ended:
        run(core)
    is_refused(core, DuplicateRequestError, "request id 'a.1' is in use; choose another", request_id="a", n=2)
    core.submit(FULL_PROMPT, max_tokens=1, request_id="a")
    run(core)


def test_a_request_cannot_take_the_name_of_a_sample() -> None:
    core = core_with()
    core.submit(FULL_PROMPT, max_tokens=3, request_id="a", n=3)
    is_refused(core, DuplicateRequestError, "request id 'a.2' is in use", request_id="a.2")


def test_who_leaves_the_name_out_gets_one_whose_samples_are_free_too() -> None:
    core = core_with()
    core.submit([1], max_tokens=1, request_id="r0.1")
    assert core.submit(FULL_PROMPT, max_tokens=1, n=2).request_id == "r1"
    run(core)


def test_names_that_others_have_reserved_count_as_in_use_for_samples_too() -> None:
    core = core_with()
    with pytest.raises(DuplicateRequestError, match=r"'a\.1' is in use"):
        core.prepare([Submission(FULL_PROMPT, TWO, "a")], reserved={"a.1"})
    prepared = core.prepare([Submission(FULL_PROMPT, TWO, "a")])
    core.submit([1], max_tokens=1, request_id="a.1")
    before, events = core.state(), len(core.log)
    with pytest.raises(DuplicateRequestError, match=r"'a\.1' is in use"):
        core.enter(prepared)
    assert (core.state(), len(core.log)) == (before, events)


def test_a_request_may_wait_for_a_sample() -> None:
    core = core_with()
    core.submit(FULL_PROMPT, max_tokens=4, request_id="a", n=2)
    core.submit([1], max_tokens=1, request_id="late", after=("a.1", 3))
    run(core)
    arrived = {e.request_id: e.step for e in events_of(core, ev.RequestArrived)}
    assert arrived == {"a": 0, "a.1": 0, "late": 3}


def test_the_sentence_that_lists_the_fields_of_sampling_lists_all_of_them() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        core_with().submit([1], samples=3)
    fields = re.findall(r"\w+", str(caught.value).split("sampling has ")[1])
    assert fields == [*list(Sampling.__dataclass_fields__)[:-1], "and", list(Sampling.__dataclass_fields__)[-1]]


# -- Adapters and items ------------------------------------------------------------------------------------


def test_an_adapter_that_does_not_exist_is_told_the_nearest_name_or_all() -> None:
    core = core_with(("law", "poetry"))
    is_refused(core, InvalidRequestError, "model 'virtual' has no adapter 'lw'; did you mean 'law'?", adapter="lw")
    is_refused(core, InvalidRequestError, "has no adapter 'zzz'; choose one of law, poetry", adapter="zzz")
    assert core.submit(FULL_PROMPT, max_tokens=1, adapter="law").adapter == "law"
    assert core.submit(FULL_PROMPT, max_tokens=1).adapter is None
    run(core)


def test_without_adapters_every_name_is_refused_with_the_way_to_load_one() -> None:
    message = "model 'virtual' has no adapter 'law'; none was loaded; pass Engine(..., adapters={...})"
    is_refused(core_with(()), InvalidRequestError, message, adapter="law")


def test_a_virtual_model_that_was_given_no_adapters_takes_any_name() -> None:
    assert core_with(None).submit(FULL_PROMPT, max_tokens=1, adapter="anything").adapter == "anything"


def test_the_virtual_model_takes_the_names_of_the_adapters_it_is_given() -> None:
    with Engine("virtual", adapters={"law": "no/such/folder"}) as engine:
        assert engine.submit([1, 2], max_tokens=1, adapter="law").result(30).finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="no adapter 'low'; did you mean 'law'"):
            engine.submit([1, 2], max_tokens=1, adapter="low")


@pytest.mark.parametrize("adapters", [["law"], "law", 5])
def test_adapters_that_are_no_folders_by_name_are_refused(adapters: Any) -> None:
    with pytest.raises(ConfigError, match=r"adapters is .*; give a folder for each name, such as"):
        Engine("virtual", adapters=adapters)


def test_adapters_beside_a_runner_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="adapters were given beside a runner; let the function that makes the run"):
        Engine(runner=VirtualRunner, adapters={"law": "x"})


def test_items_may_be_given_in_any_order_and_touch_each_other() -> None:
    core = core_with()
    items = [MultimodalItem("second", 5, 4), MultimodalItem("first", 0, 5)]
    request = core.submit(FULL_PROMPT, max_tokens=1, multimodal=items, cache_salt="s", adapter="a")
    assert request.extra_keys == (
        ("adapter", "a"),
        ("multimodal", "first", 0, 5),
        ("multimodal", "second", 5, 4),
        ("cache_salt", "s"),
    )
    run(core)


# -- On a real model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_engine() -> Iterator[Engine]:
    """An engine over the tiny model, without adapters."""
    with Engine("tiny", num_blocks=16) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": "law"}, "model 'tiny' has no adapter 'law'; none was loaded; pass Engine(..., adapters={...})"),
        ({"adapter": ""}, "adapter is ''; it must be the name of an adapter, or None"),
        ({"multimodal": [ITEM]}, "model 'tiny' reads text alone; multimodal items are for the virtual model"),
        ({"multimodal": [ITEM, ITEM]}, "model 'tiny' reads text alone"),
        ({"multimodal": [MultimodalItem("a", 9, 1)]}, "covers tokens 9 to 9, and the prompt has 9"),
        ({"n": 9}, "n is 9 samples"),
    ],
)
def test_a_real_model_refuses_what_it_cannot_compute_and_goes_on(
    real_engine: Engine, fields: dict[str, Any], message: str
) -> None:
    before, events = real_engine.state(), len(real_engine.log)
    with pytest.raises(InvalidRequestError) as caught:
        real_engine.submit(FULL_PROMPT, max_tokens=1, **fields)
    assert message in str(caught.value)
    assert (real_engine.state(), len(real_engine.log)) == (before, events)
    assert real_engine.submit(FULL_PROMPT, max_tokens=1, multimodal=()).result(60).finish_reason == "length"


@pytest.mark.parametrize(
    "token", [np.float32(1.7), Fraction(3, 2), Decimal("Infinity"), Decimal(2), 1.0, True, None], ids=repr
)
def test_a_token_id_that_is_no_whole_number_is_refused_and_never_cut(token: Any) -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    with pytest.raises(InvalidRequestError, match=r"token 1 of the prompt is .*; token ids are whole numbers"):
        core.submit([1, token], max_tokens=1)


def test_token_ids_of_other_libraries_are_taken() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    assert core.submit(np.array([1, 2, 3]), max_tokens=1).prompt_token_ids == (1, 2, 3)  # type: ignore[arg-type]


def test_half_a_character_in_a_request_id_is_refused() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    with pytest.raises(InvalidRequestError, match="character 1 of request_id is half of a surrogate pair"):
        core.submit([1], max_tokens=1, request_id="a\ud800")


@pytest.mark.parametrize("temperature", [10**400, 1e31, float("inf"), -0.1])
def test_a_temperature_that_no_model_can_use_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature is .*; it must be a number of 0 \(greedy\) or more"):
        Sampling(temperature=temperature)
