"""The session server: one URL per episode, token in, token out.

A turn passes through ``api`` (socket), ``conversation`` and ``bodies`` (what is new of it), ``dialects``
(request), ``forest`` and ``matching`` (where it hangs), ``turn`` (order of things), ``families`` (rendering
and parsing), the router (engine), ``journal`` (commit) and back. ``client`` is how environments and the
trainer reach it, ``fake`` is for tests.
"""
