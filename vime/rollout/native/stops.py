"""Stop strings, found in incrementally decoded text.

The token that completes a stop string is the sample's last token: it and all before it are kept, also where its text
reaches beyond the stop string. Token ids are never made from text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Watches the response of one sample.

    Decodes a short window of tokens with and without the new one; what the new one adds is searched together with
    the tail of the text before. A token that ends inside a character adds its text once the character is complete.
    """

    def __init__(self, strings: Sequence[str], detokenize: Detokenize) -> None:
        self._strings = tuple(strings)
        self._detokenize = detokenize
        self._keep = max(len(text) for text in strings) - 1
        self._window: list[int] = []
        self._read = 0
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string that the text contains now, or None."""
        self._window.append(token)
        before = self._detokenize(self._window[: self._read])
        after = self._detokenize(self._window)
        text = self._tail + after[len(before) :]
        for stop in self._strings:
            if stop in text:
                return stop
        if not after.endswith(INCOMPLETE):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._tail = text[len(text) - self._keep :] if self._keep < len(text) else text
        return None
