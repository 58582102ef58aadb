"""The counters: tokens recovered and computed, TTFT, requests by state, free blocks, the step.

Owns the live view (``counters.js``, ``counters.css``). The sums are folded in ``fold/totals.js``.

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``counters.js``.
"""
