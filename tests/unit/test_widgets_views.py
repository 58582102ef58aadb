"""A live view and the race console, seen from the kernel: what they send, and how they end."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minivllm import ConfigError, Engine, EngineConfig, EngineCore, UnknownNameError, VirtualRunner
from minivllm.step import ScheduledStep
from widgets import LabView, Picture, RaceConsole
from widgets.console import MAX_REQUESTS
from widgets.live import PANELS, LogWidget, Which

GUARD_S = 30
OWN_THREADS = ("view-publisher", "race-console", "minivllm-engine")


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name in OWN_THREADS])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What the widgets send to their pages, with the widget that sent it."""
    messages: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(LogWidget, "send", lambda self, content, buffers=None: messages.append((self, content)))
    return messages


def events_sent(sent: list[tuple[Any, dict[str, Any]]], view: Any) -> int:
    return sum(len(message["events"]) for widget, message in sent if widget is view)


def a_core(**config: Any) -> EngineCore:
    core = EngineCore(EngineConfig(**config), VirtualRunner())
    core.submit(list(range(40)), max_tokens=4)
    core.run()
    return core


# --- LabView ----------------------------------------------------------------------------------------------


def test_a_view_is_told_without_an_address() -> None:
    view = LabView(a_core(), show=("story", "pool"))
    assert repr(view) == "LabView(virtual: pool, story)"
    view.close()


def test_a_view_shows_a_core_an_engine_and_a_finished_log(sent: list[tuple[Any, dict[str, Any]]]) -> None:
    core = a_core()
    with Engine("virtual") as engine:
        for shown, log in ((core, core.log), (engine, engine.log), (core.log, core.log)):
            view = LabView(shown)
            view._on_message(view, {"want": 0, "page": "p", "asked": 1}, [])
            count = len(log)
            wait_until(functools.partial(lambda w, n: events_sent(sent, w) == n, view, count))
            view.close()


def test_a_view_of_something_without_a_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="a view cannot show a dict"):
        LabView({})
    with pytest.raises(UnknownNameError, match="did you mean 'timeline'"):
        LabView(a_core(), show=("time line",))


def test_showing_an_engine_again_closes_the_view_of_before(sent: list[tuple[Any, dict[str, Any]]]) -> None:
    with Engine("virtual") as engine:
        first, other = LabView(engine), LabView(a_core())
        second = LabView(engine)
        assert first.comm is None  # off the page
        assert other.comm is not None and second.comm is not None
        assert len(engine._worker.listeners) == 1
        second.close()
        other.close()
        assert engine._worker.listeners == []


def test_the_thread_of_a_view_ends_when_its_core_is_gone_or_closed(sent: list[tuple[Any, dict[str, Any]]]) -> None:
    forgotten, closed = a_core(), a_core()
    views = [LabView(forgotten), LabView(closed)]
    counts = [len(forgotten.log), len(closed.log)]
    for view, count in zip(views, counts, strict=True):
        view._on_message(view, {"want": 0, "page": "p", "asked": 1}, [])
        wait_until(functools.partial(lambda w, n: events_sent(sent, w) == n, view, count))
        assert view.publisher.is_running  # the core may go on
    reference = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert reference() is None  # the view does not hold it
    closed.close()
    wait_until(lambda: not any(view.publisher.is_running for view in views))
    for view in views:
        assert view.error is None
        view.close()


def test_a_cell_that_is_run_again_closes_what_it_showed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cell: list[tuple[str, int] | None] = [None]
    monkeypatch.setattr("minivllm.engine.notebook_cells.current_cell", lambda: cell[0])
    monkeypatch.setattr("widgets.live.views_of_cells._made", {})
    no_cell = LabView(a_core())
    cell[0] = ("a", 1)
    first, second = LabView(a_core()), LabView(a_core())  # one cell may show two
    cell[0] = ("b", 2)
    other = LabView(a_core())
    assert all(view.comm is not None for view in (no_cell, first, second, other))
    cell[0] = ("a", 3)
    again = LabView(a_core())
    assert first.comm is None and second.comm is None
    assert all(view.comm is not None for view in (no_cell, other, again))
    for view in (no_cell, other, again):
        view.close()


def test_a_page_that_asks_twice_is_answered_once(sent: list[tuple[Any, dict[str, Any]]]) -> None:
    view = LabView(a_core().log)
    for asked in (2, 1, 2):  # 1 lay in the queue of a busy kernel while 2 was heard
        view._on_message(view, {"want": 0, "page": "p", "asked": asked}, [])
        wait_until(lambda: not view.publisher.is_running)
    assert len(sent) == 1
    view._on_message(view, {"want": 0, "page": "q", "asked": 1}, [])
    wait_until(lambda: not view.publisher.is_running)
    assert len(sent) == 2
    junk: list[Any] = [None, 7, [], {}, {"do": "fire"}]
    for nonsense in junk:
        view._on_message(view, nonsense, [])
    view.close()


def test_a_view_gives_pictures() -> None:
    view = LabView(a_core())
    every: tuple[Which, ...] = ("pool", "tables", "chain", "timeline")
    for which in every:
        assert isinstance(view.picture(which), Picture)
    with pytest.raises(UnknownNameError, match="did you mean 'chain'"):
        view.picture("chian")  # type: ignore[arg-type]
    view.close()
    view.close()


VIEW_MIME = "application/vnd.jupyter.widget-view+json"


def shown_by(view: LabView) -> dict[str, Any]:
    """What a cell that ends in the view puts into the notebook."""
    bundle = view._repr_mimebundle_()
    assert bundle is not None
    view.close()
    return bundle[0]


def test_a_page_that_cannot_show_the_view_finds_its_timeline_beside_it() -> None:
    core = a_core()
    core.submit([1, 2, 3], request_id="second", max_tokens=2)
    core.run()
    for shown in (core, core.log):
        view = LabView(shown)
        timeline = view.picture("timeline")._repr_html_()
        bundle = shown_by(view)
        assert bundle == {VIEW_MIME: bundle[VIEW_MIME], "text/plain": repr(view), "text/html": timeline}
    assert "second" in timeline
    assert shown_by(LabView(core))["text/html"] == timeline  # the same each time
    core.submit([1, 2, 3], request_id="third", max_tokens=2)
    assert "third" in shown_by(LabView(core))["text/html"]  # of the moment when it is shown


def test_there_is_no_picture_of_nothing_and_none_of_an_engine_that_runs_by_itself() -> None:
    core = EngineCore(EngineConfig(), VirtualRunner())
    assert shown_by(LabView(core)).keys() == {VIEW_MIME, "text/plain"}
    with Engine("virtual") as engine:
        engine.submit([1, 2, 3], max_tokens=2).result()
        assert shown_by(LabView(engine)).keys() == {VIEW_MIME, "text/plain"}


def test_a_virtual_log_is_played_and_a_real_one_is_live() -> None:
    assert LabView(a_core()).paced is True
    assert LabView(a_core(), paced=False).paced is False


# --- RaceConsole ------------------------------------------------------------------------------------------


class Desk:
    """A console without a page: presses its buttons by message and reads what it says."""

    def __init__(self, sent: list[tuple[Any, dict[str, Any]]], *args: Any, **kwargs: Any) -> None:
        self.console = RaceConsole(*args, **kwargs)
        self._sent = sent

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(m["level"], m["text"]) for w, m in self._sent if w is self.console and m["type"] == "status"]

    def press(self, do: str, **options: Any) -> None:
        shown = {field["name"]: field["value"] for field in self.console.controls["fields"]}
        message = {"do": do, "options": shown | options} if do == "fire" else {"do": do}
        self.console._on_message(self.console, message, [])

    def hear(self, words: str, times: int = 1) -> None:
        wait_until(lambda: sum(words in text for _, text in self.said) >= times)

    def recovered(self) -> dict[str, int]:
        assert self.console.engine is not None
        return {name: r.recovered_tokens for name, r in self.console.engine.metrics().requests.items()}


@pytest.fixture
def desk(sent: list[tuple[Any, dict[str, Any]]]) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(*args: Any, **kwargs: Any) -> Desk:
        desks.append(Desk(sent, *args, **kwargs))
        return desks[-1]

    yield make
    for made in desks:
        made.console.close()


def test_a_race_is_fired_with_the_rules_of_the_page(desk: Callable[..., Desk]) -> None:
    table = desk(model="virtual", speed="0", num_requests=4, max_tokens=4)
    table.hear("virtual is ready")
    table.press("fire")
    table.hear("Race 1 is over.")
    assert table.recovered() == {"r0": 0, "r1": 0, "r2": 0, "r3": 0}
    table.press("fire", coordination="single-flight", release="after-prefill")
    table.hear("Race 2 is over.")
    assert list(table.recovered().values())[4:] == [0, 528, 528, 528]
    table.press("fire", coordination="single-flight", cache="warm")
    table.hear("Race 3 is over.")
    assert list(table.recovered().items())[8:] == [(f"r3.{i}", 528) for i in range(4)]
    assert repr(table.console) == "RaceConsole(virtual)"


@pytest.mark.parametrize(("prompts", "expected"), [("same", [0, 528]), ("shared", [0, 512]), ("different", [0, 0])])
def test_same_shared_and_different_prompts(desk: Callable[..., Desk], prompts: str, expected: list[int]) -> None:
    table = desk(model="virtual", speed="0", num_requests=2, max_tokens=4, arrival="staggered")
    table.hear("ready")
    table.press("fire", prompts=prompts, publication="incremental")
    table.hear("is over")
    assert list(table.recovered().values()) == expected


MISTAKES: dict[str, list[tuple[Any, str]]] = {
    "num_requests": [(MAX_REQUESTS + 1, "Requests is 17; give a whole number from 1 to 16."), (0, "Requests is 0")],
    "prompt_tokens": [
        (None, "Prompt tokens is empty; give a whole number from 1 to 8,192."),
        (10**6, "Prompt tokens is 1000000; give"),
        (8192, "the pool has 512"),
        (2.5, "Prompt tokens is 2.5"),
        (True, "Prompt tokens is True"),
    ],
    "max_tokens": [(0, "Output tokens is 0"), ("4", "Output tokens is 4; give a whole number")],
    "shared_tokens": [(600, "Shared_tokens is 600; it must be from 0 (nothing shared) to prompt_tokens, 532")],
    "prompts": [("sane", "did you mean 'same'?")],
    "arrival": [("togther", "did you mean 'together'?")],
    "publication": [("incremntal", "did you mean 'incremental'?")],
    "speed": [("9000", "Speed has no choice '9000'")],
}


@pytest.mark.parametrize(("name", "value", "words"), [(n, v, w) for n, cases in MISTAKES.items() for v, w in cases])
def test_a_mistake_is_a_sentence_and_the_console_lives_on(
    desk: Callable[..., Desk], capsys: pytest.CaptureFixture[str], name: str, value: Any, words: str
) -> None:
    table = desk(model="virtual", speed="0", num_requests=2, prompts="shared")
    table.hear("ready")
    table.press("fire", **{name: value})
    table.hear(words)
    level, text = table.said[-1]
    assert level == "error" and text[0].isupper() and text[-1] in ".?"
    table.press("fire")
    table.hear("Race 1 is over.")
    assert capsys.readouterr() == ("", "")


def test_a_second_fire_while_one_runs_is_refused_and_so_is_a_reset(desk: Callable[..., Desk]) -> None:
    table = desk(model="virtual", speed="2", num_requests=2)
    table.hear("ready")
    table.press("fire")
    table.hear("Race 1 runs: 2 requests are on their way.")
    table.press("fire")
    table.hear("A race is running; wait until it is over, or abort its leader.")
    table.press("reset_cache")
    table.hear("A block is in use, so the cache cannot be reset")


def test_the_leader_is_aborted_and_the_followers_finish(desk: Callable[..., Desk]) -> None:
    gate = threading.Event()

    def wait_at_the_gate(step: ScheduledStep) -> None:
        assert gate.wait(GUARD_S)

    with Engine("virtual", runner=lambda: VirtualRunner(on_step=wait_at_the_gate)) as engine:
        table = desk(engine, num_requests=3, prompt_tokens=4000, coordination="single-flight", max_tokens=4)
        table.hear("ready")
        table.press("abort_leader")
        table.hear("No race is running, so there is no leader to abort")
        table.press("fire")
        table.hear("Race 1 runs")
        wait_until(lambda: any(event.kind == "step_scheduled" for event in engine.log))
        table.press("abort_leader")
        wait_until(lambda: not engine._worker.commands.empty())  # it lies there while the first step computes
        gate.set()
        table.hear("r0 led its flight and was aborted.")
        table.hear("Race 1 is over.")
        ends = {name: view.state.value for name, view in engine.state().requests.items()}
        assert ends == {"r0": "aborted", "r1": "finished", "r2": "finished"}
        engine.check_invariants()
        table.press("reset_cache")
        table.hear("The cache is reset: nothing is published any more.")


def test_who_computes_a_shared_prefix_is_aborted_and_the_held_ones_finish(desk: Callable[..., Desk]) -> None:
    gate = threading.Event()

    def wait_at_the_gate(step: ScheduledStep) -> None:
        assert gate.wait(GUARD_S)

    config = EngineConfig(long_prefill_token_threshold=1024)  # so that the others get a look in the first step
    with Engine("virtual", config, runner=lambda: VirtualRunner(on_step=wait_at_the_gate)) as engine:
        table = desk(engine, num_requests=3, prompt_tokens=4000, max_tokens=4, prompts="shared", shared_tokens=3904)
        table.hear("ready")
        table.press("fire", coordination="shared-prefix")
        table.hear("Race 1 runs")
        wait_until(lambda: any(event.kind == "prefix_awaited" for event in engine.log))
        table.press("abort_leader")
        wait_until(lambda: not engine._worker.commands.empty())
        gate.set()
        table.hear("r0 computed what others wait for and was aborted.")
        table.hear("Race 1 is over.")
        ends = {name: view.state.value for name, view in engine.state().requests.items()}
        assert ends == {"r0": "aborted", "r1": "finished", "r2": "finished"}
        assert table.recovered()["r2"] == 3904
        engine.check_invariants()


def test_what_a_real_model_refuses_is_offered_on_the_virtual_one_only(desk: Callable[..., Desk]) -> None:
    def offered(table: Desk) -> list[str]:
        field = next(f for f in table.console.controls["fields"] if f["name"] == "publication")
        return [value for value, _ in field["choices"]]

    table = desk(model="virtual", speed="0", num_requests=3, max_tokens=4)
    assert offered(table) == ["on-completion", "incremental", "at-allocation"]
    assert offered(desk(model="no-such-model")) == ["on-completion", "incremental"]
    table.hear("virtual is ready")
    table.press("fire", publication="at-allocation", coordination="independent")
    table.hear("Race 1 is over.")
    assert table.recovered() == {"r0": 0, "r1": 528, "r2": 528}  # in one step, as each layer writes before it reads


def test_without_flights_the_oldest_request_is_aborted(desk: Callable[..., Desk]) -> None:
    table = desk(model="virtual", speed="2", num_requests=2)
    table.hear("ready")
    table.press("fire")
    table.hear("Race 1 runs")
    table.press("abort_leader")
    table.hear("No flight is open: r0, the oldest request, was aborted.")


def test_a_dead_engine_is_said_and_replaced(desk: Callable[..., Desk]) -> None:
    def fail(step: ScheduledStep) -> None:
        raise RuntimeError("the device went away")

    with Engine("virtual", runner=lambda: VirtualRunner(on_step=fail)) as engine:
        table = desk(engine, num_requests=2, max_tokens=4)
        table.hear("ready")
        table.press("fire")
        table.hear("The engine stopped on an error (RuntimeError: the device went away). Fire makes a new engine.")
        table.press("fire")
        table.hear("Race 2 is over.")
        assert table.console.engine is not engine
        assert table.recovered() == {"r0": 0, "r1": 0}


def test_a_closed_engine_is_said_and_replaced(desk: Callable[..., Desk]) -> None:
    with Engine("virtual", runner=lambda: VirtualRunner(on_step=lambda step: time.sleep(0.3))) as engine:
        table = desk(engine, num_requests=2)
        table.hear("ready")
        table.press("fire")
        table.hear("Race 1 runs")
    table.hear("The engine was closed. Fire makes a new one.")
    table.press("fire")
    table.hear("Race 2 is over.")


def test_a_model_that_does_not_exist_is_said_with_the_nearest_name(desk: Callable[..., Desk]) -> None:
    table = desk(model="smolm2")
    table.hear("did you mean 'smollm2'?")
    table.press("fire")
    table.hear("did you mean 'smollm2'?", times=2)


def test_an_engine_that_is_given_stays_open_and_one_of_its_own_is_closed(desk: Callable[..., Desk]) -> None:
    with Engine("virtual") as engine:
        given = desk(engine)
        given.hear("ready")
        given.console.close()
        given.console.close()
        assert engine.is_alive
    own = desk(model="virtual")
    own.hear("ready")
    its = own.console.engine
    assert its is not None
    own.console.close()
    assert not its.is_alive


def test_closing_in_the_middle_of_a_slow_race_does_not_wait_for_it(desk: Callable[..., Desk]) -> None:
    table = desk(model="virtual", speed="2", num_requests=8, max_tokens=2000, prompt_tokens=16)
    table.hear("ready")
    table.press("fire")
    table.hear("Race 1 runs")
    table.console.close()
    assert table.console.engine is not None and not table.console.engine.is_alive


def test_a_console_of_the_same_model_closes_the_one_of_before(desk: Callable[..., Desk]) -> None:
    first = desk(model="virtual")
    first.hear("ready")
    engine = first.console.engine
    desk(model="virtual").hear("ready")
    assert first.console.comm is None
    assert engine is not None and not engine.is_alive


def test_closing_does_not_wait_for_a_model_that_is_on_its_way(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widgets.console.console._CLOSE_SECONDS", 0.01)
    asked, there = threading.Event(), threading.Event()
    made: list[Engine] = []

    def bring(*args: Any, **kwargs: Any) -> Engine:
        asked.set()
        assert there.wait(GUARD_S)
        made.append(Engine("virtual"))
        return made[0]

    monkeypatch.setattr("widgets.console.console.Engine", bring)
    table = desk("smollm2")
    assert asked.wait(GUARD_S)
    table.console.fire()  # is not obeyed any more
    table.console.close()
    assert table.console.comm is None and not made  # the console is off the page, the model still on its way
    there.set()
    table.console._thread.join(GUARD_S)
    assert not table.console._thread.is_alive()
    assert not made[0].is_alive and len(made[0].log) == 1


def test_a_models_name_may_come_first_and_a_panel_may_be_one_word(desk: Callable[..., Desk]) -> None:
    table = desk("virtual", show="pool")
    table.hear("virtual is ready")
    assert table.console.show == ["pool"]
    assert repr(table.console) == "RaceConsole(virtual)"


def test_what_is_no_engine_no_name_and_no_config_is_refused() -> None:
    wrong: Any = a_core()
    with pytest.raises(ConfigError, match="cannot drive an EngineCore; give it an Engine, or a model"):
        RaceConsole(wrong)
    settings: Any = {"num_blocks": 64}
    with pytest.raises(ConfigError, match=r"config is \{'num_blocks': 64\}; pass an EngineConfig"):
        RaceConsole("virtual", config=settings)
    number: Any = 7
    with pytest.raises(ConfigError, match="model is 7; give a model's name"):
        RaceConsole(model=number)


def test_a_page_that_comes_late_hears_the_last_sentence(desk: Callable[..., Desk]) -> None:
    table = desk(model="virtual")
    table.hear("virtual is ready. Choose a race and press Fire.")
    table.console._on_message(table.console, {"want": 0, "page": "late", "asked": 1}, [])
    table.hear("virtual is ready. Choose a race and press Fire.", times=2)


def test_controls_and_panels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'num_requests'"):
        RaceConsole(model="virtual", num_request=3)
    with pytest.raises(UnknownNameError, match="release has no choice 'after'"):
        RaceConsole(model="virtual", release="after")
    with pytest.raises(UnknownNameError, match="no panel is called 'pools'"):
        RaceConsole(model="virtual", show=("pools",))


def test_the_controls_begin_with_the_settings_of_the_engine(desk: Callable[..., Desk]) -> None:
    config = EngineConfig(publication="incremental", coordination="single-flight", num_blocks=64)
    table = desk(model="virtual", config=config)
    fields = {field["name"]: field for field in table.console.controls["fields"]}
    assert fields["publication"]["value"] == "incremental"
    assert fields["coordination"]["value"] == "single-flight"
    assert fields["prompt_tokens"]["max"] == 64 * 16
    assert set(table.console.show) == set(PANELS)
