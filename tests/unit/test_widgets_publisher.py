"""The publisher sends everything, not too often, and leaves no thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minivllm import Engine, EngineConfig, EngineCore, VirtualRunner, replay
from minivllm.log.event_log import EventLog
from minivllm.log.events import TokenOut
from widgets.live import Publisher, Source, make_checkpoint
from widgets.live.checkpoint import IdlePlace
from widgets.live.publisher import MAX_BACKLOG, MAX_EVENTS_PER_MESSAGE, MAX_HZ

GUARD_S = 30


class Page:
    """Keeps messages as a page would: `events` are those that it has, in order and without a gap."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.epoch = 0
        self._changed = threading.Condition()

    def __call__(self, message: dict[str, Any]) -> None:
        with self._changed:
            self.times.append(time.monotonic())
            self.messages.append(message)
            if message["epoch"] != self.epoch:
                self.epoch, self.events = message["epoch"], []
            if message["type"] == "events":
                assert message["from"] <= len(self.events), "events are missing"
                self.events.extend(message["events"][len(self.events) - message["from"] :])
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[Page], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), GUARD_S)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def publisher_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "view-publisher"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not publisher_threads())


def run_core(**config: Any) -> EngineCore:
    core = EngineCore(EngineConfig(**config), VirtualRunner())
    for _ in range(3):
        core.submit(list(range(100)), max_tokens=8)
    core.run()
    return core


def test_nothing_is_sent_before_a_page_asks() -> None:
    page = Page()
    publisher = Publisher(page)
    publisher.attach(Source(run_core().log))
    assert not publisher.is_running
    assert page.messages == []
    publisher.close()


def test_a_page_gets_every_event_once_it_asks_and_the_thread_ends() -> None:
    core, page = run_core(), Page()
    publisher = Publisher(page)
    publisher.attach(Source(core.log))
    publisher.want(0)
    page.wait_for(lambda p: len(p.events) == len(core.log))
    assert page.events == [event.as_dict() for event in core.log]
    wait_until(lambda: not publisher.is_running)  # a finished log has nothing more to say
    publisher.want(0)  # and yet a page that is loaded again is answered
    page.wait_for(lambda p: p.messages[-1]["from"] == 0 and len(p.messages) > 1)
    publisher.close()


def test_nothing_is_lost_while_an_engine_works_and_at_most_twenty_messages_a_second_go_out() -> None:
    page = Page()
    with Engine("virtual", runner=lambda: VirtualRunner(on_step=lambda step: time.sleep(0.002))) as engine:
        publisher = Publisher(page)
        publisher.attach(Source(engine.log, engine.add_listener, lambda: engine.is_alive))
        publisher.want(0)
        handles = [engine.submit(list(range(50)), max_tokens=120) for _ in range(4)]
        for handle in handles:
            handle.result(GUARD_S)
        page.wait_for(lambda p: len(p.events) == len(engine.log))
        assert page.events == [event.as_dict() for event in engine.log]
        publisher.close()
    assert len(page.messages) > 2  # it did send while the engine worked
    pauses = [b - a for a, b in zip(page.times, page.times[1:], strict=False)]
    assert min(pauses) >= 1 / MAX_HZ * 0.98


def test_messages_are_cut_to_size() -> None:
    core, page = run_core(), Page()
    publisher = Publisher(page, max_hz=1000, max_events=10)
    publisher.attach(Source(core.log))
    publisher.want(0)
    page.wait_for(lambda p: len(p.events) == len(core.log))
    assert max(len(message["events"]) for message in page.messages) == 10
    publisher.close()


def test_a_synchronous_core_is_seen_without_a_listener() -> None:
    core, page = EngineCore(EngineConfig(), VirtualRunner()), Page()
    publisher = Publisher(page)
    publisher.attach(Source(core.log, None, lambda: True, poll_seconds=0.02))
    publisher.want(0)
    page.wait_for(lambda p: len(p.events) == 1)
    core.submit([1, 2, 3], max_tokens=2)
    core.run()
    page.wait_for(lambda p: len(p.events) == len(core.log))
    publisher.close()
    assert not publisher.is_running


def test_another_source_is_another_epoch_from_its_first_event() -> None:
    first, second, page = run_core(), run_core(num_blocks=64), Page()
    publisher = Publisher(page)
    publisher.attach(Source(first.log))
    publisher.want(0)
    page.wait_for(lambda p: len(p.events) == len(first.log))
    publisher.attach(Source(second.log))
    page.wait_for(lambda p: p.epoch == 2 and len(p.events) == len(second.log))
    assert page.events[0]["num_blocks"] == 64
    publisher.close()


def test_the_thread_ends_with_its_engine() -> None:
    page = Page()
    engine = Engine("virtual")
    publisher = Publisher(page)
    publisher.attach(Source(engine.log, engine.add_listener, lambda: engine.is_alive))
    publisher.want(0)
    page.wait_for(lambda p: len(p.events) == 1)
    assert publisher.is_running
    engine.close()
    wait_until(lambda: not publisher.is_running)


def test_a_send_that_fails_ends_it_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    def send(message: dict[str, Any]) -> None:
        raise ConnectionError("the page went away")

    publisher = Publisher(send)
    publisher.attach(Source(run_core().log, None, lambda: True))
    publisher.want(0)
    wait_until(lambda: not publisher.is_running)
    assert str(publisher.error) == "the page went away"
    publisher.want(0)
    assert not publisher.is_running
    assert capsys.readouterr() == ("", "")


def test_closing_takes_the_listener_off_and_closing_twice_is_fine() -> None:
    with Engine("virtual") as engine:
        publisher = Publisher(Page())
        publisher.attach(Source(engine.log, engine.add_listener, lambda: engine.is_alive))
        publisher.want(0)
        assert len(engine._worker.listeners) == 1
        publisher.close()
        publisher.close()
        assert engine._worker.listeners == []
        publisher.attach(Source(engine.log, engine.add_listener, lambda: engine.is_alive))
        assert engine._worker.listeners == []


@pytest.mark.parametrize("nonsense", [None, -5, "3", 2.5, True])
def test_nonsense_from_a_page_asks_for_all(nonsense: Any) -> None:
    core, page = run_core(), Page()
    publisher = Publisher(page)
    publisher.attach(Source(core.log))
    publisher.want(nonsense)
    page.wait_for(lambda p: len(p.events) == len(core.log))
    publisher.close()


def long_log() -> EventLog:
    core = run_core()
    while len(core.log) < MAX_BACKLOG + 2 * MAX_EVENTS_PER_MESSAGE:
        for _ in range(8):
            core.submit(list(range(100)), max_tokens=200)
        core.run()
    return core.log


def test_a_long_backlog_is_a_checkpoint_and_what_came_after_it() -> None:
    log = long_log()
    page: list[dict[str, Any]] = []
    publisher = Publisher(page.append, max_hz=1000)
    publisher.attach(Source(log))
    publisher.want(0)
    wait_until(lambda: not publisher.is_running)
    assert page[0]["type"] == "checkpoint"
    seq = page[0]["seq"]
    assert seq > len(log) - MAX_BACKLOG
    state = replay(log, until_seq=seq).as_dict()
    assert page[0]["state"]["blocks"] == state["blocks"]
    assert page[0]["state"]["free_queue"] == state["free_queue"]
    assert page[0]["state"]["requests"] == {}  # all had ended there
    assert set(page[0]["hashes"]) == set(state["prefix_index"])
    assert [event["seq"] for message in page[1:] for event in message["events"]] == list(range(seq, len(log)))
    publisher.close()


def test_a_long_log_is_walked_through_once_however_often_it_is_asked_for_an_idle_place() -> None:
    class Counting(EventLog):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.read += len(found) if isinstance(index, slice) else 1
            return found

    log = Counting(lambda: 0.0)
    for event in run_core().log:
        log.append(event)
    place = IdlePlace(log)
    answers = [place.before(end) for end in range(len(log) + 1)]
    assert log.read == len(log)
    for end, answer in enumerate(answers):
        assert answer == IdlePlace(log).before(end)
    idle = [seq for seq in range(len(log) + 1) if all(r.state.is_ended for r in replay(log, seq).requests.values())]
    assert answers == [max(seq for seq in idle if seq <= end) for end in range(len(log) + 1)]


def test_a_checkpoint_knows_the_policies_of_its_moment_and_forgets_what_was_reset() -> None:
    core = run_core()
    core.reset_cache()
    core.set_policies(publication="incremental", coordination="single-flight", release="on-completion")
    checkpoint = make_checkpoint(core.log, len(core.log))
    assert checkpoint["hashes"] == {}
    assert checkpoint["config"]["publication"] == "incremental"
    assert checkpoint["config"]["coordination"] == "single-flight"
    assert make_checkpoint(core.log, 1)["config"]["publication"] == "on-completion"


def test_an_event_of_a_page_is_plain_json() -> None:
    log = EventLog(lambda: 1.5)
    log.append(TokenOut("r0", 0, 7, "hé"))
    page = Page()
    publisher = Publisher(page)
    publisher.attach(Source(log))
    publisher.want(0)
    page.wait_for(lambda p: bool(p.events))
    expected = {"kind": "token_out", "seq": 0, "step": 0, "ms": 1.5}
    assert page.events == [expected | {"request_id": "r0", "index": 0, "token_id": 7, "text": "hé"}]
    publisher.close()
