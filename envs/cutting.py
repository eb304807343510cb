"""Text that is too long, without its middle: what stands at either end of an output says most. Pure."""

from __future__ import annotations

__all__ = ["cut_characters", "cut_middle"]


def cut_middle(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` bytes of UTF-8; what is left out is its middle, and is counted.

    >>> cut_middle("x" * 100, 60)
    'xxxxxxxxxxxxxxx\\n[... 70 bytes left out ...]\\nxxxxxxxxxxxxxxx'
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode()
    room = len(f"\n[... {len(data)} bytes left out ...]\n")
    half = max(0, limit - room) // 2
    head = data[:half].decode("utf-8", "ignore")
    tail = data[len(data) - half :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    mark = f"\n[... {left_out} bytes left out ...]\n"
    return head + mark + tail if limit >= room else mark.strip()[:limit]


def cut_characters(text: str, most: int) -> str:
    """``most`` characters of ``text``, half of them from its end, and a mark between.

    >>> cut_characters("abcdef", 4)
    'ab\\n[... cut ...]\\nef'
    """
    return text if len(text) <= most else f"{text[: most // 2]}\n[... cut ...]\n{text[-most // 2 :]}"
