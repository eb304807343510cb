"""OpenEnv environments behind their WebSocket: reset, step, tools, rewards."""
