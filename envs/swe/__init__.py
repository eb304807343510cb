"""SWE tasks: repositories with one bug, made from published source distributions, and their grading.

Owns the task format, the generator, the download cache, the environment ``swe`` and its grader.
"""
