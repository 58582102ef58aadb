"""How hypothesis runs here: the same examples every time, no time limit, and a failure that can be replayed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

STEADY = settings(
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
"""Parent of all settings: ``@settings(STEADY, max_examples=...)``."""
