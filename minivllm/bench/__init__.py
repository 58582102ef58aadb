"""Benchmarks: workloads, run on the real model or on the virtual clock.

Owns what is measured and how it is reported: the cold-cache race, and what the cache manager itself costs beside an
obvious one. Must not know terminals or files. Drives engines through their public interface.

Read `workloads` (what is fired), then `race` and `race_words` (what it shows), then `manager` and `reference_manager`.
"""

from minivllm.bench.race import RaceResult, run_race
from minivllm.bench.workloads import Race, document_tokens, race_submissions

__all__ = ["Race", "RaceResult", "document_tokens", "race_submissions", "run_race"]
