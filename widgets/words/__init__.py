"""Words that several parts share: counts, ranges, lists, and what keeps a request's blocks apart.

Owns how such values read, on a page (``words.js``) and in a picture or a text (``words.py``). Both say the same.

Must not know events, states, lanes, or how anything is drawn. Imports no other part of `widgets`.

Read ``words.py``, then ``words.js``.
"""

from widgets.words.words import count_range, keys_words, listed, new_keys_words, plural

__all__ = ["count_range", "keys_words", "listed", "new_keys_words", "plural"]
