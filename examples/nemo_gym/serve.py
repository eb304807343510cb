"""Serve one resources server of the nemo-gym package, alone: no Ray, no head server, no agent server.

    python examples/nemo_gym/serve.py resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer \
        --port 8000
"""

from __future__ import annotations

import argparse
import importlib

import uvicorn
from nemo_gym.server_utils import ServerClient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="module:Class of a resources server")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    module, _, name = arguments.server.partition(":")
    server_class = getattr(importlib.import_module(module), name)
    fields = {"name": name, "host": "127.0.0.1", "port": arguments.port, "entrypoint": "app.py", "domain": "agent"}
    config = server_class.model_fields["config"].annotation.model_validate(fields)
    server = server_class(config=config, server_client=ServerClient.model_construct())
    app = server.setup_webserver()
    server.setup_liveness(app)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
