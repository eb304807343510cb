"""micro-SWE: small generated projects, each with one bug; run the check, read the error, edit, submit.

Real files, real commands in a sandbox, hidden checks in a fresh one. ``environment`` is the way in.
"""
