"""Single-turn maths: questions with an answer that can be checked by symbol, not by text."""
