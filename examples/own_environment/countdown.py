"""A whole environment: count down from a number with one tool; every right step earns its share."""

from tollway.envs.base import Environment, Grader, Task, ToolAnswer, Toolset, Verdict, Work
from tollway.envs.config import EnvConfig
from tollway.envs.order import place
from tollway.messages import Message, ToolCall, ToolSpec

SAY = ToolSpec(name="say", parameters='{"type":"object","properties":{"number":{"type":"integer"}}}')


class Countdown(Environment):
    name, size, needs_submission = "countdown", 3, False

    def __init__(self, config: EnvConfig) -> None:
        self.seed = config.seed

    def task(self, index: int) -> Task:
        start = 1 + place(self.seed, 3, index)
        prompt = Message(role="user", content=f"Count down from {start} to 0, one call of say for each number.")
        return Task(task_id=f"countdown/{start}", messages=(prompt,), machine=None)

    def toolset(self, task: Task, sandbox: object) -> Toolset:
        return CountdownTools(int(task.task_id.rpartition("/")[2]))

    def grader(self, task: Task) -> Grader:
        return CountdownGrader()


class CountdownTools(Toolset):
    specs = (SAY,)

    def __init__(self, start: int) -> None:
        self.wanted, self.steps, self.right = start, start + 1, 0

    async def call(self, call: ToolCall) -> ToolAnswer:
        if call.name != "say" or call.arguments.replace(" ", "") != f'{{"number":{self.wanted}}}':
            return ToolAnswer("wrong", ends=True)
        self.right, self.wanted = self.right + 1, self.wanted - 1
        return ToolAnswer("right", ends=self.wanted < 0)

    @property
    def facts(self) -> dict[str, float]:
        return {"right": float(self.right)}


class CountdownGrader(Grader):
    async def grade(self, task: Task, work: Work) -> Verdict:
        assert isinstance(work.tools, CountdownTools)
        return Verdict(reward=work.tools.right / work.tools.steps, reason=f"{work.tools.right} right steps")
