"""Who leads now, and aborting it.

Knows a core and its coordinator. Must not know the page or threads.
"""

from __future__ import annotations

from minivllm.engine import EngineCore
from minivllm.request import RequestState


def abort_leader(core: EngineCore) -> str | None:
    """Abort who leads, or else the oldest request. Return a sentence about it, None if there is no request.

    Who leads: the leader of the oldest open flight, or whom the oldest request waits for that is held for a prefix.
    """
    open_requests = [r for r in core.requests.values() if not r.state.is_ended]
    arrived = sorted((r for r in open_requests if r.state is not RequestState.DEFERRED), key=lambda r: r.arrival)
    oldest = [request.request_id for request in arrived]
    flights, awaiting = core.coordinator.flights, core.coordinator.awaiting
    leads = [flight.leader_id for _, flight in sorted(flights.items())]
    computes = [awaiting[name] for name in oldest if name in awaiting]
    for names, words in (
        (leads, "{} led its flight and was aborted."),
        (computes, "{} computed what others wait for and was aborted."),
        (oldest, "No flight is open: {}, the oldest request, was aborted."),
    ):
        if names:
            core.abort(names[0])
            return words.format(names[0])
    return None
