"""Sets of whole numbers as sorted, disjoint, half-open spans."""

from spans.core import Span, SpanSet
from spans.text import format_spans, parse_spans

__all__ = ["Span", "SpanSet", "format_spans", "parse_spans"]
