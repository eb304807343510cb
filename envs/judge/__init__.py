"""A language model as the grader, in a session of its own with a model of its own."""
