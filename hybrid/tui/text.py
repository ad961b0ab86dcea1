"""Make text from a model or a file safe to print. Next: hybrid/tui/render.py."""

from __future__ import annotations

import re

# Everything that can drive a terminal or hide what a line says: C0 and C1 controls (newline and
# tab stay), bidirectional overrides, and lone surrogates, which cannot be encoded at all.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: str) -> str:
    r"""Return `text` with every control character replaced by a visible stand-in.

    Works character by character, so an escape sequence cut in two by streaming is caught as well.
    A carriage return is dropped: CRLF becomes a newline and nothing can overwrite a line.
    """
    return _UNSAFE.sub(_stand_in, text)


def _stand_in(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x0D:
        return ""
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
