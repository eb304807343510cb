"""The session server: one URL per episode, token in, token out.

A turn passes through ``api`` (socket), ``conversation`` (what is new of it), ``dialects`` (request), ``turn`` (order of things), ``matching``
and ``forest`` (where it hangs), ``families`` (rendering and parsing), the router (engine), ``journal``
(commit) and back. ``client`` is how environments and the trainer reach it, ``fake`` is for tests.
"""
