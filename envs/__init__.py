"""Environments: tasks, tools, harnesses, graders, and the runner that turns them into episodes.

``runner`` is the way in for training, ``micro_swe`` the environment that is shipped. Reaches models only through
the session server's client, and machines only through the sandbox protocol.
"""
