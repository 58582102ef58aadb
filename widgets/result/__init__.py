"""The result of a race: what each request recovered, and all of them together.

Owns the live view (``result.js``, ``result.css``).

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``result.js``.
"""
