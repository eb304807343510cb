"""Commands as harnesses: they run in real sandboxes without a network and reach a real session server."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path

import pytest
from command_helpers import AGENT, scene, settings

from tollway.envs.config import EnvConfig
from tollway.envs.harnesses.command import CommandHarness
from tollway.envs.harnesses.recipes import Place, fill
from tollway.envs.harnesses.registry import open_harness
from tollway.envs.micro_swe.environment import MicroSwe
from tollway.errors import ConfigError, SandboxError
from tollway.router.fake import FakeReply
from tollway.sandboxes.config import SandboxConfig
from tollway.sandboxes.local import LocalProvider

FIX = "turns(2); fix(); turns(1)"


async def test_a_command_solves_a_task_without_a_network_and_its_trajectory_is_exact(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        group = await here.play(settings(FIX + "; print('done')"))
        (rollout,) = group.rollouts
        assert rollout.reward == 1.0, (rollout, here.log)
        assert rollout.turns == 3
        (run,) = here.runs
        assert (run.submitted, run.finish, run.answer) == (True, "submitted", "done")
        engine = here.server.engine
        known = {(*request.input_ids, *engine.replies[request.rid]) for request in engine.requests}
        assert {tuple(row.token_ids.tolist()) for row in rollout.rows} <= known
        assert sum(int(row.loss_mask.sum()) for row in rollout.rows) == sum(map(len, engine.replies.values()))
        assert local.live == 0


async def test_in_a_sandbox_that_keeps_a_session_it_is_the_same(tmp_path: Path, local: LocalProvider) -> None:
    config = SandboxConfig.model_validate({"local": {"mode": "session"}})
    async with LocalProvider(config) as provider, scene(tmp_path, provider) as here:
        (rollout,) = (await here.play(settings(FIX))).rollouts
        assert rollout.reward == 1.0, (rollout, here.log)
        assert provider.live == 0


async def test_code_that_the_agent_runs_may_call_the_model_and_is_a_conversation_of_its_own(
    local: LocalProvider, tmp_path: Path
) -> None:
    body = """\
messages = [{"role": "user", "content": open(os.environ["AGENT_TASK"]).read()}]
messages += [ask(messages), {"role": "user", "content": "go on"}]
child = "exec(open('/tmp/tollway/agent.py').read().split('#-')[0]); ask([dict(role='user', content='hi')])"
subprocess.run([sys.executable, "-c", child], check=True)
messages += [ask(messages)]
fix()
"""
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings("#-\n" + body))).rollouts
        assert rollout.reward == 1.0, here.log
        reasons = sorted(row.branch_reason for row in rollout.rows)
        assert reasons in (["new_root", "root"], ["new_conversation", "root"]), reasons
        spans = sorted(len(row.turn_spans) for row in rollout.rows)
        assert spans == [1, 2]


PROBES = """\
import socket
turns(1)
reached = []
base, key = MODEL[:-3], KEY
for port in PORTS:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        reached.append("host loopback %d" % port)
    except OSError:
        pass
for address in (("10.0.0.1", 80), ("169.254.169.254", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, timeout=2).close()
        reached.append(str(address))
    except OSError:
        pass


def raw(data, target=None):
    with socket.create_connection(("127.0.0.1", 8700), timeout=5) as link:
        link.sendall(data)
        answer = b""
        try:
            while piece := link.recv(65536):
                answer += piece
        except TimeoutError:
            pass
        return answer


head = "Host: x\\r\\nAuthorization: Bearer %s\\r\\nConnection: close\\r\\n\\r\\n"
for method, target in TARGETS:
    answer = raw(("%s %s HTTP/1.1\\r\\n" % (method, target) + head % key).encode())
    if not answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")):
        reached.append("%s %s: %r" % (method, target, answer[:100]))
listed = []
for name in ("/run/tollway", "/run"):
    try:
        listed.append(sorted(os.listdir(name)))
    except OSError:
        listed.append("unlistable")
try:
    open("/run/tollway/x", "w")
    reached.append("wrote beside the socket")
except OSError:
    pass
try:
    os.unlink("/run/tollway/model.sock")
    reached.append("removed the socket")
except OSError:
    pass
secrets = []
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    for kind in ("cmdline", "environ"):
        try:
            data = open("/proc/%s/%s" % (pid, kind), "rb").read()
        except OSError:
            continue
        if kind == "cmdline" and KEY.encode() in data:
            secrets.append("key in the arguments of %s" % pid)
        if b"tw_" in data:
            secrets.append("session token in %s of %s" % (kind, pid))
        if kind == "environ" and KEY.encode() in data and pid != str(os.getpid()):
            secrets.append("key in the environment of %s" % pid)
print(json.dumps({"reached": reached, "secrets": secrets, "listed": listed, "key": KEY}))
"""


async def test_from_inside_nothing_else_is_reachable_and_no_secret_lies_about(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        other = await here.server.client.create()
        ports = [int(url.rpartition(":")[2]) for url in (here.server.url, here.server.engine.url)]
        targets = [
            ("GET", "/"),
            ("GET", "/engines"),
            ("GET", "/metrics"),
            ("DELETE", f"/sessions/{other.session_id}"),
            ("GET", f"/sessions/{other.session_id}"),
            ("POST", f"/sessions/{other.session_id}/v1/chat/completions"),
            ("GET", f"/sessions/{other.session_id}/trajectories"),
            ("POST", "/sessions"),
            ("GET", "/v1/%2e%2e/engines"),
            ("GET", f"{here.server.url}/engines"),
            ("CONNECT", here.server.url.removeprefix("http://")),
        ]
        body = f"PORTS, TARGETS = {ports!r}, {targets!r}\n{PROBES}"
        group = await here.play(settings(body))
        assert group.rollouts[0].error is None, group
        found = json.loads(here.runs[0].answer)
        assert found["reached"] == []
        assert found["secrets"] == []
        assert found["key"] == "[key]", "the log keeps no key"
        assert "bridge-" not in here.log
        assert here.runs[0].facts["refused_calls"] == len(targets)


async def test_how_a_command_ends_is_how_the_run_ended(local: LocalProvider, tmp_path: Path) -> None:
    async with scene(tmp_path, local) as here:
        for body, command, wanted in (
            ("turns(1); fix(); sys.exit(3)", {}, (False, "stopped", 0.0)),
            ("turns(1); fix(); sys.exit(3)", {"submitted_codes": [3]}, (True, "submitted", 1.0)),
            ("turns(1); os.kill(os.getpid(), 9)", {}, (False, "stopped", 0.0)),
        ):
            (rollout,) = (await here.play(settings(body, **command))).rollouts
            run = here.runs[-1]
            assert (run.submitted, run.finish, rollout.reward) == wanted, rollout
        assert here.runs[0].facts["exit_code"] == 3.0
        assert here.runs[-1].facts["exit_code"] == 137.0


async def test_a_run_that_takes_too_long_ends_with_its_turns_and_its_log(local: LocalProvider, tmp_path: Path) -> None:
    body = "turns(2); print('so far', flush=True); import time; time.sleep(600)"
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play({**settings(body), "agent_timeout_s": 8.0})).rollouts
        (run,) = here.runs
        assert (run.finish, run.submitted, run.turns, run.answer) == ("timeout", False, 2, "so far")
        assert rollout.reward == 0.0
        assert local.live == 0


async def test_an_overflow_that_ends_the_command_is_one_of_the_context(local: LocalProvider, tmp_path: Path) -> None:
    body = "turns(1); ask([{'role': 'user', 'content': 'x' * 60000}])"
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings(body))).rollouts
        assert here.runs[0].finish == "context"
        assert rollout.reward == 0.0


async def test_a_command_that_never_asked_its_model_is_a_broken_set_up_and_no_zero(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings("sys.exit('no model configured')"))).rollouts
        assert rollout.reward is None
        assert rollout.error is not None
        assert "no model configured" in rollout.error
        (rollout,) = (await here.play(settings("", argv=["no-such-agent"]))).rollouts
        assert rollout.error is not None
        assert "no-such-agent" in rollout.error


async def test_a_model_that_is_lost_is_an_infrastructure_failure_whatever_the_command_says(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        script = here.server.engine.script
        replies = iter(range(3))
        here.server.engine.script = lambda request: (
            script(request) if next(replies, None) is not None else FakeReply(ids=[], status=500, error="broken")
        )
        body = "try:\n    turns(5)\nexcept urllib.error.HTTPError:\n    pass"
        (rollout,) = (await here.play(settings(body))).rollouts
        assert rollout.reward is None
        assert rollout.error is not None


class Breaks(LocalProvider):
    """Loses the sandbox under every command that takes long, once it is over."""

    lost = 0

    async def run(self, *args, **kwargs):
        done = await super().run(*args, **kwargs)
        if b"agent ran" in done.stdout:
            self.lost += 1
            raise SandboxError("connection lost")
        return done


async def test_a_lost_command_is_not_run_again_in_the_same_place(tmp_path: Path, local: LocalProvider) -> None:
    """A second run there would go on in a dirty workspace and in the same trajectory."""
    body = "turns(3); open('/workspace/dirt', 'a').write('x'); print('agent ran', os.path.getsize('/workspace/dirt'))"
    async with Breaks(local.config) as provider, scene(tmp_path, provider) as here:
        (rollout,) = (await here.play({**settings(body), "attempts": 2})).rollouts
        assert rollout.reward is None
        assert provider.lost == 2, "each attempt of the episode ran it once"
        assert len(here.server.engine.requests) == 6
        firsts = [request.input_ids for request in here.server.engine.requests[::3]]
        assert firsts[0] == firsts[1], "the second attempt began anew"


async def test_cancelling_an_episode_ends_command_bridge_and_call(local: LocalProvider, tmp_path: Path) -> None:
    async with scene(tmp_path, local) as here:
        here.server.engine.script = lambda request: FakeReply(ids=[111, 261], delay_s=600)
        playing = asyncio.create_task(here.play(settings("turns(1)")))
        while not here.server.engine.in_flight:
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        while here.server.engine.in_flight or local.live:
            await asyncio.sleep(0.05)


async def test_standard_input_files_and_variables_are_templates(local: LocalProvider, tmp_path: Path) -> None:
    body = """\
turns(1)
print(json.dumps({
    "stdin": sys.stdin.read(), "env": os.environ["SHOWN"], "home": os.environ["HOME"], "cwd": os.getcwd(),
    "file": open(os.path.expanduser("~/.agent/config.json")).read(), "task": open(os.environ["AGENT_TASK"]).read(),
    "mode": oct(os.stat(os.path.expanduser("~/.agent/config.json")).st_mode & 0o777),
}))
"""
    config = json.dumps({"url": "{anthropic_base_url}", "model": "{model}", "limit": "{context_tokens}", "x": "{y}"})
    async with scene(tmp_path, local) as here:
        env = settings(
            body,
            stdin="{instruction}",
            files={".agent/config.json": config},
            env={"SHOWN": "{base_url} {home} {workspace}"},
        )
        await here.play(env)
        told = json.loads(here.runs[0].answer)
        task = MicroSwe(EnvConfig()).task(0).messages[-1].content
        assert told["stdin"] == told["task"] == task
        assert told["env"] == "http://127.0.0.1:8700 /tmp/tollway /workspace"
        assert (told["home"], told["cwd"], told["mode"]) == ("/tmp/tollway", "/workspace", "0o600")
        assert json.loads(told["file"]) == {
            "url": "http://127.0.0.1:8700",
            "model": "policy",
            "limit": "131072",
            "x": "{y}",
        }


async def test_by_a_public_address_a_command_needs_nothing_of_this_machine(
    local: LocalProvider, tmp_path: Path
) -> None:
    body = FIX + "; print(MODEL, os.path.exists('/run/tollway'))"
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings(body, public_url=here.server.url))).rollouts
        assert rollout.reward == 1.0, rollout
        assert rollout.turns == 3
        assert here.runs[0].answer == f"{here.server.url}/sessions/{rollout.session_id}/v1 False"


async def test_with_an_open_network_the_bridge_is_still_the_way_to_the_model(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings(FIX + "; print(MODEL)", network="public"))).rollouts
        assert rollout.reward == 1.0, rollout
        assert here.server.url not in here.runs[0].answer


class Elsewhere(LocalProvider):
    """Takes no files of this machine."""

    caps = LocalProvider.caps - {"host_files"}


async def test_with_a_provider_on_another_machine_it_is_said_what_to_set(tmp_path: Path, local: LocalProvider) -> None:
    async with Elsewhere(local.config) as provider, scene(tmp_path, provider) as here:
        (rollout,) = (await here.play({**settings(FIX), "attempts": 3})).rollouts
        assert rollout.error is not None
        assert rollout.error.startswith("sandbox_capability_missing")
        assert "env.command.public_url" in rollout.error
        (rollout,) = (await here.play(settings(FIX, public_url=here.server.url))).rollouts
        assert rollout.reward == 1.0


def test_a_token_in_the_arguments_is_refused_at_the_start() -> None:
    config = EnvConfig.model_validate({"command": {"argv": ["agent", "--key={token}"]}})
    with pytest.raises(ConfigError, match="argv must not hold"):
        CommandHarness(config, MicroSwe(config))
    with pytest.raises(ConfigError, match="argv is empty"):
        CommandHarness(EnvConfig(), MicroSwe(config))


def test_what_cannot_be_mounted_is_told_at_the_start() -> None:
    config = EnvConfig.model_validate({"command": {"argv": ["agent"], "mounts": {"/opt/agent": "/nowhere/agent"}}})
    with pytest.raises(ConfigError, match=r"env\.command\.mounts: no /nowhere/agent on this machine"):
        CommandHarness(config, MicroSwe(config))


def test_tools_that_are_not_ours_cannot_be_blanked() -> None:
    config = EnvConfig.model_validate({"blank_tools": True, "command": {"argv": ["agent"]}})
    with pytest.raises(ConfigError, match=r"env\.blank_tools"):
        CommandHarness(config, MicroSwe(config))


def test_what_a_template_brings_in_is_not_filled_again() -> None:
    place = Place(
        base_url="http://m", token="secret", model="p", context_tokens=1, instruction="{token} {home} {instruction}"
    )
    assert (
        fill("{instruction}|{token}|{nothing}|${home}", place)
        == "{token} {home} {instruction}|secret|{nothing}|$/tmp/tollway"
    )
    assert "secret" not in repr(place)
    assert AGENT


BESIDE = """\
def there(*words, stdin=None):
    return subprocess.run(["tollway-exec", *words], capture_output=True, input=stdin, text=True)


turns(1)
told = {
    "here": sorted(os.listdir("/workspace")),
    "there": there("ls | sort").stdout.split(),
    "status": there("echo out; echo err >&2; exit 7").returncode,
    "argv": there("--cwd", "/tmp", "--", "/usr/bin/python3", "-c", "import os; print(os.getcwd())").stdout.strip(),
    "stdin": there("--stdin", "--", "cat", stdin="héllo").stdout,
    "slow": there("--timeout", "0.5", "sleep 60").returncode,
    "big": len(there("head -c 300000 /dev/zero | tr '\\\\0' x").stdout),
    "no program": there("--", "no-such-program").returncode,
    "model there": there("ls /run/tollway").returncode,
    "fixed": there("--", *json.loads(os.environ["AGENT_FIX"])).returncode,
}
open(os.path.expanduser("~/.tollway-exec"), "w").write("bridge-wrong")
told["wrong key"] = there("true").returncode
print(json.dumps(told))
"""


async def test_a_harness_beside_has_its_own_sandbox_and_works_in_the_tasks_one(
    local: LocalProvider, tmp_path: Path
) -> None:
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings(BESIDE, where="beside"))).rollouts
        assert rollout.error is None, rollout
        told = json.loads(here.runs[0].answer)
        assert told["here"] == []
        assert "check.py" in told["there"]
        assert (told["status"], told["argv"], told["stdin"], told["slow"]) == (7, "/tmp", "héllo", 124)
        assert (told["big"], told["no program"], told["fixed"], told["wrong key"]) == (300_000, 127, 0, 125)
        assert told["model there"] != 0, "the task's sandbox has no bridge"
        assert rollout.reward == 1.0
        assert local.live == 0


async def test_an_agent_takes_no_place_from_the_commands_that_it_waits_for(
    tmp_path: Path, local: LocalProvider
) -> None:
    config = SandboxConfig.model_validate({"max_running": 1})
    body = "turns(1); told = subprocess.run(['tollway-exec', 'true']).returncode; print(told)"
    async with LocalProvider(config) as provider, scene(tmp_path, provider) as here:
        (rollout,) = (await here.play(settings(body, where="beside"))).rollouts
        assert rollout.error is None, rollout
        assert here.runs[0].answer == "0"


async def test_a_task_sandbox_that_is_lost_under_a_harness_beside_is_no_agents_failure(tmp_path: Path) -> None:
    body = "turns(1); print(subprocess.run(['tollway-exec', 'echo agent ran']).returncode)"
    async with Breaks(SandboxConfig()) as provider, scene(tmp_path, provider) as here:
        (rollout,) = (await here.play(settings(body, where="beside"))).rollouts
        assert rollout.reward is None
        assert rollout.error is not None
        assert "connection lost" in rollout.error


async def test_what_a_harness_beside_left_running_ends_with_it(local: LocalProvider, tmp_path: Path) -> None:
    body = """\
turns(1)
child = subprocess.Popen(["tollway-exec", "echo started > /workspace/mark; sleep 300"])
while subprocess.run(["tollway-exec", "test -e /workspace/mark"]).returncode:
    pass
child.kill()
child.wait()
subprocess.Popen(["tollway-exec", "sleep 300"], start_new_session=True)
print(subprocess.run(["tollway-exec", "echo still here"], capture_output=True, text=True).stdout)
"""
    async with scene(tmp_path, local) as here:
        (rollout,) = (await here.play(settings(body, where="beside"))).rollouts
        assert rollout.error is None, rollout
        assert here.runs[0].answer == "still here"
        assert here.runs[0].finish == "submitted"
        assert local.live == 0


def test_where_a_harness_can_be_is_said_at_the_start() -> None:
    for name in ("codex", "claude-code", "opencode", "qwen-code", "openhands"):
        config = EnvConfig.model_validate({"harness": name, "command": {"where": "beside"}})
        with pytest.raises(ConfigError, match="beside"):
            open_harness(config, MicroSwe(config))
    config = EnvConfig.model_validate(
        {"command": {"where": "beside", "argv": ["a"], "public_url": "http://example.org"}}
    )
    with pytest.raises(ConfigError, match="public_url"):
        CommandHarness(config, MicroSwe(config))


@pytest.mark.parametrize(
    ("name", "key"),
    [("codex", "node_home"), ("mini-swe-agent", "python_home"), ("qwen-code", "node"), ("openhands", "openhands_home")],
)
def test_a_missing_harness_is_an_error_at_the_start_that_says_how_to_get_it(
    name: str, key: str, tmp_path: Path
) -> None:
    config = EnvConfig.model_validate({"harness": name, "command": {key: tmp_path / "nowhere", "node_home": tmp_path}})
    with pytest.raises(ConfigError, match=r"scripts/setup_(harnesses|openhands)"):
        open_harness(config, MicroSwe(config))


SHIPPED = ("mini-swe-agent", "codex", "claude-code", "opencode", "qwen-code", "openhands")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_harness_tells_its_key_in_files_only_and_an_image_can_bring_it(name: str) -> None:
    config = EnvConfig.model_validate({"harness": name, "command": {"public_url": "http://example.org"}})
    harness = open_harness(config, MicroSwe(config))
    assert isinstance(harness, CommandHarness)
    place = Place(base_url="http://m:1", token="SECRET", model="policy", context_tokens=4096, instruction="Work.")
    recipe = harness.recipe(place)
    told = [fill(part, place) for part in (*recipe.argv, *recipe.env.values(), recipe.stdin)]
    assert not [part for part in told if "SECRET" in part]
    assert not [part for part in recipe.argv if "/opt/tollway" in part], "nothing is mounted in that image"
    assert "http://m:1" in "".join(fill(text, place) for text in recipe.files.values())
    assert "SECRET" in "".join(fill(text, place) for text in recipe.files.values())
    for path, text in recipe.files.items():
        if path.endswith(".json"):
            json.loads(fill(text, place))
        elif path.endswith(".toml"):
            tomllib.loads(fill(text, place))
        elif path.endswith(".py"):
            assert fill(text, place) == text, "a program is no template"
