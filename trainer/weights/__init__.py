"""Getting weights out: wire format, refit sessions into running engines, model directories on disk."""
