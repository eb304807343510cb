"""Runs mini-swe-agent on one task, inside a sandbox: ``mini_swe_inside.py SETTINGS INSTRUCTION``.

Exit status 0: the agent submitted; 1: it stopped otherwise; another one: it broke. Knows the harness's own Python API
and nothing of tollway, which is not there.
"""

from __future__ import annotations

import json
import shlex
import site
import sys
from pathlib import Path


def main() -> int:
    """Build the agent from its shipped configuration, run it, say how it ended."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if Path(settings["packages"]).is_dir():
        site.addsitedir(settings["packages"])
        # In front of what the system's Python may have of the same names.
        sys.path.insert(0, settings["packages"])
    import litellm  # type: ignore[import-not-found,unused-ignore]  # the sandbox's
    import yaml  # type: ignore[import-untyped,unused-ignore]  # the sandbox's
    from minisweagent import package_dir  # type: ignore[import-not-found,unused-ignore]  # the sandbox's
    from minisweagent.agents.default import DefaultAgent  # type: ignore[import-not-found,unused-ignore]  # likewise
    from minisweagent.environments.local import LocalEnvironment  # type: ignore[import-not-found,unused-ignore]
    from minisweagent.models import get_model  # type: ignore[import-not-found,unused-ignore]  # the sandbox's

    litellm.suppress_debug_info = True  # else it prints about a model without a price
    config = yaml.safe_load((package_dir / "config" / settings["config"]).read_text(encoding="utf-8"))
    model = config["model"]
    model["model_kwargs"] |= {"api_base": settings["api_base"], "api_key": settings["api_key"]}
    model |= {"cost_tracking": "ignore_errors"}
    if "textbased" in settings["config"]:
        model["model_class"] = "litellm_textbased"
    agent = {key: value for key, value in config["agent"].items() if key in ("system_template", "instance_template")}
    environment = config.get("environment", {})

    class Beside(LocalEnvironment):  # type: ignore[misc,unused-ignore]  # the sandbox's
        """Commands go to the task's sandbox."""

        def execute(self, action: dict[str, str], *args: object, **more: object) -> object:
            set_here = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.get("env", {}).items())
            line = f"{set_here} exec bash -c {shlex.quote(action.get('command', ''))}"
            return super().execute({**action, "command": f"tollway-exec {shlex.quote(line)}"}, *args, **more)

    kind = Beside if settings["beside"] else LocalEnvironment
    # How long it may go on is for the runner to say.
    made = DefaultAgent(
        get_model(settings["model"], model),
        kind(cwd=settings["cwd"], **environment),
        **agent,
        step_limit=0,
        cost_limit=0,
    )
    done = made.run(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps({"exit_status": done.get("exit_status"), "submission": done.get("submission")}))  # noqa: T201
    return 0 if done.get("exit_status") == "Submitted" else 1


if __name__ == "__main__":
    sys.exit(main())
