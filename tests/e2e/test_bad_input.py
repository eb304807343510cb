"""Wrong configuration and missing parts: one clear message with the next step, a non-zero exit, nothing started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from demo_runs import DEMO

from tollway.fresh_model import ModelShape, write_fresh_model


def tollway(*arguments: str, env: dict[str, str] | None = None, wrapper: tuple[str, ...] = ()) -> tuple[int, str]:
    done = subprocess.run(
        [*wrapper, sys.executable, "-P", "-m", "tollway", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (env or {}),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--set", "trainer.stesp=3"), "trainer.stesp: unknown key; did you mean 'steps'?"),
        (("--set", "trainer.steps=zero"), "trainer.steps"),
        (("--set", "sandbox.provider=nowhere"), "sandbox.provider='nowhere' is unknown"),
        (("--set", "env.name=nothing"), "env.name='nothing' is unknown"),
        (("--set", "server.family=unheard-of"), "unheard-of"),
        (("--set", "trainer"), "want section.key=value"),
        (("--set", "engine.kind=sglang"), "engine.kind"),
        (("--set", "trainer.backend=torch", "--set", "trainer.dtype=bfloat16"), 'or train with "megatron"'),
    ],
)
def test_a_wrong_key_or_value_is_named_and_exits_2(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    code, output = tollway("train", "-c", str(DEMO), "--set", f"run.dir={tmp_path / 'run'}", *arguments)
    assert (code, text in output) == (2, True), output


def test_a_missing_configuration_file_or_model_is_named(tmp_path: Path) -> None:
    code, output = tollway("train", "-c", str(tmp_path / "none.toml"))
    assert (code, "no configuration file" in output) == (2, True), output
    code, output = tollway("train", "--set", f"run.dir={tmp_path / 'run'}")
    assert (code, "no model: set model.path" in output) == (2, True), output


def test_a_model_directory_without_weights_is_refused_by_engine_and_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_fresh_model(model, ModelShape(vocab_size=272), seed=0)
    (model / "model.safetensors").unlink()
    code, output = tollway("engine", "--model-path", str(model))
    assert (code, "weights" in output and str(model) in output) == (2, True), output
    code, output = tollway("train", "--set", f"model.path={model}", "--set", f"run.dir={tmp_path / 'run'}")
    assert (code, "no *.safetensors" in output) == (2, True), output
    code, output = tollway("engine", "--model-path", str(tmp_path / "nowhere"))
    assert (code, "nowhere" in output) == (2, True), output


def test_a_port_in_use_is_named_by_engine_and_server(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_fresh_model(model, ModelShape(vocab_size=272), seed=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, output = tollway("engine", "--model-path", str(model), "--port", port)
        assert (code, port in output and "use" in output) == (2, True), output
        key = {"TOLLWAY_ADMIN_KEY": "k" * 20}
        journal = ("--set", f"server.journal={tmp_path / 'j.sqlite'}")
        code, output = tollway("serve", "--port", port, *journal, env=key)
        assert (code, port in output and "use" in output) == (2, True), output


def test_a_server_without_an_admin_key_does_not_start(tmp_path: Path) -> None:
    code, output = tollway("serve", "--port", "0", env={"TOLLWAY_ADMIN_KEY": ""})
    assert (code, "TOLLWAY_ADMIN_KEY" in output) == (2, True), output


def test_without_bubblewrap_the_run_says_how_to_get_it(tmp_path: Path) -> None:
    missing = ("--set", f"sandbox.local.bwrap={tmp_path / 'none'}")
    code, output = tollway("train", "-c", str(DEMO), "--set", f"run.dir={tmp_path / 'run'}", *missing)
    assert (code, "bubblewrap" in output) == (2, True), output
    assert not (tmp_path / "run" / "logs").exists()


# Start the command in a user namespace of its own in which no further one may be made. Every uid is mapped, so
# that nothing else is missing there.
NO_NAMESPACES = """
import ctypes, os, sys
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if ctypes.CDLL(None).unshare(0x10000000):
        os._exit(77)
    os.write(ready[1], b".")
    os.read(go[0], 1)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    os.execvp(sys.argv[1], sys.argv[1:])
os.close(ready[1])
if os.read(ready[0], 1):
    for name in ("uid_map", "gid_map"):
        open(f"/proc/{child}/{name}", "w").write("0 0 4294967295")
    os.write(go[1], b".")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make the namespace that forbids namespaces")
def test_without_user_namespaces_the_run_says_which_setting_forbids_them(tmp_path: Path) -> None:
    wrapper = (sys.executable, "-c", NO_NAMESPACES)
    code, output = tollway("train", "-c", str(DEMO), "--set", f"run.dir={tmp_path / 'run'}", wrapper=wrapper)
    assert (code, "max_user_namespaces" in output) == (2, True), output


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user's sandboxes run under that user")
def test_a_workspace_root_that_sandboxes_cannot_reach_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    root = ("--set", f"sandbox.local.root={tmp_path}", "--set", f"run.dir={tmp_path / 'run'}")
    code, output = tollway("train", "-c", str(DEMO), *root)
    assert (code, "set sandbox.local.root" in output) == (2, True), output


def test_eval_without_a_checkpoint_says_to_train_first(tmp_path: Path) -> None:
    code, output = tollway("eval", "-c", str(DEMO), "--set", f"run.dir={tmp_path / 'run'}")
    assert (code, "train first" in output) == (2, True), output
