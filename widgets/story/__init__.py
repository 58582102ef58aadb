"""The story: what just happened and why, in sentences, newest first.

Owns the sentence of each kind of entry (``sentences.js``) and the live view (``story.js``, ``story.css``). Which events
make an entry is decided in ``fold/story.js``.

Draws from the fold with the shared looks. Must not know other views, engines, or how events arrive.

Read ``sentences.js``, then ``story.js``.
"""
