"""Small text tools."""

from wording.cases import camel, snake, title
from wording.layout import columns, indent, wrap
from wording.speech import duration, join, plural

__all__ = ["camel", "columns", "duration", "indent", "join", "plural", "snake", "title", "wrap"]
