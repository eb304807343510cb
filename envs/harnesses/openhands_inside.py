"""Runs the OpenHands SDK's agent on one task, inside a sandbox: ``openhands_inside.py SETTINGS INSTRUCTION``.

Exit status 0: the agent finished; 1: it stopped otherwise; another one: it broke. Knows the SDK and nothing of
tollway, which is not there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    """Build the agent, give it the task, run it to its end."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # isort: off
    from openhands.sdk import LLM, Agent, Conversation, Tool  # type: ignore[import-not-found,unused-ignore]
    from openhands.sdk.conversation import ConversationExecutionStatus  # type: ignore[import-not-found,unused-ignore]
    from openhands.tools.file_editor import FileEditorTool  # type: ignore[import-not-found,unused-ignore]
    from openhands.tools.task_tracker import TaskTrackerTool  # type: ignore[import-not-found,unused-ignore]
    from openhands.tools.terminal import TerminalTool  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        usage_id="agent",
        model=settings["model"],
        base_url=settings["base_url"],
        api_key=settings["api_key"],
        max_input_tokens=settings["context_tokens"],
        native_tool_calling=True,
    )
    tools = [Tool(name=each.name) for each in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    agent = Agent(llm=llm, tools=tools, system_prompt_kwargs={"cli_mode": True})
    talk = Conversation(
        agent=agent,
        workspace=settings["workspace"],
        persistence_dir=f"{settings['home']}/conversation",
        visualizer=None,
    )
    try:
        talk.send_message(Path(sys.argv[2]).read_text(encoding="utf-8"))
        talk.run()
        return 0 if talk.state.execution_status == ConversationExecutionStatus.FINISHED else 1
    finally:
        talk.close()


if __name__ == "__main__":
    sys.exit(main())
