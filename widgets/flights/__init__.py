"""Who computes for whom now: open flights, samples of one prompt, and shared prefixes.

Owns the live view (``flights.js``, ``flights.css``); there is no still picture, as the timeline shows the same over
time.

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``flights.js``.
"""
