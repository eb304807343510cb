"""Serve the package's simple agent in front of one resources server, alone: no Ray, no head server.

    python examples/nemo_gym/serve_agent.py MODULE:CLASS --port 8000 --model-port 8001

The agent finds its model at 127.0.0.1:MODEL_PORT.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="module:Class of a resources server")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model-port", type=int, default=8001)
    arguments = parser.parse_args()
    ports = {"resources": free_port(), "agent": arguments.port, "policy_model": arguments.model_port}
    places = {name: {"kind": {"one": {"host": HOST, "port": port}}} for name, port in ports.items()}
    client = ServerClient(
        head_server_config=BaseServerConfig(host=HOST, port=arguments.port), global_config_dict=OmegaConf.create(places)
    )
    module, _, name = arguments.server.partition(":")
    server_class = getattr(importlib.import_module(module), name)
    fields = {"name": "resources", "host": HOST, "port": ports["resources"], "entrypoint": "app.py", "domain": "agent"}
    config = server_class.model_fields["config"].annotation.model_validate(fields)
    resources = server_class(config=config, server_client=client)
    agent_fields = {
        "name": "agent",
        "host": HOST,
        "port": arguments.port,
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "resources"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "max_steps": 10,
    }
    agent = SimpleAgent(config=SimpleAgentConfig.model_validate(agent_fields), server_client=client)
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())  # else it reads a global configuration
    servers = []
    for each, port in ((resources, ports["resources"]), (agent, arguments.port)):
        app = each.setup_webserver()
        each.setup_liveness(app)
        servers.append(uvicorn.Server(uvicorn.Config(app, host=HOST, port=port, log_level="warning")))
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    asyncio.run(main())
