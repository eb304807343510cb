#!/usr/bin/env python3
"""Everything that only a GPU can show, in one run: a table at the end, and one line of JSON as the last line.

    scripts/gpu_check.py [--sglang PATH] [--out DIR] [--only STEP,...] [--budget-s N]
    scripts/gpu_check.py --cpu --only contract      the runner itself, without a GPU

contract   the engine contract and the cache ledger against two stock SGLang servers, one dense, one with experts
tests      tests/gpu, less the training loop
loop       the training loop: tests/gpu/test_loop_on_gpu.py
rollout    scripts/bench_rollout.py with two engines of its own
train      scripts/bench_train.py

Each step is a process of its own with a time limit; one that fails does not keep the others from running, and what
it started ends with it. Outputs are files of the folder --out. Exits 0 when every step that ran passed, else 1.
docs/gpu.md says what a machine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tollway.free_ports import free_ports
from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.router.facts import NEEDED_RELEASE

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("contract", "tests", "loop", "rollout", "train")
START_S = 420.0
"""Of a server: imports, kernels that are built at the first start, graphs."""
STOP_S = 15.0
LEAST_S = 20.0
"""A step with less time than this is not begun."""

# Heads of 128 and multiples of 64 everywhere: what every kernel of SGLang takes. Many layers, so that a long request
# is still running when a test comes to it.
DENSE: dict[str, object] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "head_dim": 128,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
}
EXPERTS: dict[str, object] = DENSE | {
    "num_hidden_layers": 8,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "tie_word_embeddings": False,
}
SMALL: dict[str, object] = {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16}
SMALL |= {"max_position_embeddings": 2048, "intermediate_size": 96}

FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--dtype", "bfloat16"),
    # Nothing but Triton, PyTorch and SGLang's own kernels: no FlashInfer, no FlashAttention, no grammar library.
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.4", "--max-total-tokens", "65536", "--max-running-requests", "32"),
    *("--cuda-graph-max-bs-decode", "16", "--cuda-graph-backend-prefill=disabled"),
    *("--enable-metrics", "--enable-cache-report"),
)
OF_DENSE, OF_EXPERTS = ("--enable-memory-saver",), ("--enable-return-routed-experts",)


@dataclass(slots=True)
class Result:
    """One row of the table."""

    name: str
    outcome: str
    """passed, failed, timed out, skipped"""
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    """Tests by outcome, of a step that is pytest."""
    note: str = ""
    figures: object = None
    """The last line of its output, where that is JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for."""

    cpu: bool
    sglang: str
    flags: tuple[str, ...]
    out: Path
    only: tuple[str, ...]
    select: str
    """pytest's -k on top of a step's own; empty: all."""
    ends: float
    """``time.monotonic()`` at which everything must be over."""

    def left_s(self) -> float:
        """Seconds until then."""
        return self.ends - time.monotonic()


# -- processes ------------------------------------------------------------------------------------------


class Group:
    """A process with everything that it starts: one session, ended as one."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def end(self, grace_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL for whoever is left after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        self._signal(signal.SIGTERM)
        while self._signal(0) and time.monotonic() < deadline:
            self.process.poll()  # a zombie still counts as a member of its group
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> bool:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Server(Group):
    """An engine over one model directory."""

    def __init__(self, name: str, options: Options, models: Path) -> None:
        shape, more = (DENSE, OF_DENSE) if name == "dense" else (EXPERTS, OF_EXPERTS)
        if options.cpu:
            few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            shape = SMALL if name == "dense" else SMALL | few | {"tie_word_embeddings": False}
        model = models / name
        write_fresh_model(model, ModelShape.model_validate(shape), seed=1, std=0.2)
        self.name, self.log = name, options.out / f"server-{name}.log"
        port = str(free_ports()[0])
        self.url = f"http://127.0.0.1:{port}"
        where = ["--model-path", str(model), "--host", "127.0.0.1", "--port", port]
        if options.cpu:
            command = [sys.executable, "-m", "tollway.engine", *where]
        else:
            command = [options.sglang, "serve", *where, *FLAGS, *more, *options.flags]
        super().__init__(command, self.log, {})

    def wait_until_it_generates(self, limit_s: float) -> str:
        """Empty once it generated a token, else why it did not."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health_generate", timeout=60):
                    return self._warm_up(max(10.0, deadline - time.monotonic()))
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        status = self.process.poll()
        how = f"did not serve within {limit_s:.0f} s" if status is None else f"ended with status {status}"
        return f"{self.name} server {how}: {self.log}\n{_tail(self.log, 25)}"

    def _warm_up(self, limit_s: float) -> str:
        """A first request builds what its path needs: prefill, decode, log-probabilities."""
        body = {"input_ids": list(range(60)), "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        body["top_logprobs_num"] = 2
        call = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(call, timeout=limit_s):
                return ""
        except (urllib.error.URLError, OSError) as error:
            return f"{self.name} server answered its first request with {error}\n{_tail(self.log, 25)}"


def run(name: str, command: Sequence[str], options: Options, limit_s: float, env: Mapping[str, str]) -> Result:
    """Run one process to its end or its limit; its output is ``NAME.log``."""
    limit_s = min(limit_s, options.left_s())
    if limit_s < LEAST_S:
        return Result(name, "skipped", note=f"{max(0.0, limit_s):.0f} s of the budget are left, want {LEAST_S:.0f}")
    log, started = options.out / f"{name}.log", time.monotonic()
    say(f"{name}: {shlex.join(command)}")
    group = Group(command, log, env)
    try:
        status = group.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        group.end()
    result = Result(name, "passed" if status == 0 else "failed", time.monotonic() - started)
    if status is None:
        result.outcome, result.note = "timed out", f"after {limit_s:.0f} s"
    elif status:
        result.note = f"status {status}"
    result.figures = _last_json(log)
    if result.outcome != "passed":
        say(f"--- {name}: {result.outcome} {result.note}\n{_reasons(log)}")
    say(f"{name}: {result.outcome} in {result.seconds:.0f} s")
    return result


def run_pytest(name: str, arguments: Sequence[str], options: Options, limit_s: float, env: Mapping[str, str]) -> Result:
    """Run pytest over some files, and count. Nothing that was run is a failure."""
    report = options.out / f"{name}.xml"
    report.unlink(missing_ok=True)
    # The rule that warnings are errors is for our pins, not for whatever a GPU machine has installed.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "--disable-warnings", "--tb=short"]
    command += ["-p", "no:cacheprovider", f"--basetemp={options.out / (name + '.tmp')}", f"--junitxml={report}"]
    result = run(name, [*command, *arguments], options, limit_s, env)
    if report.exists():
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = counts["failures"] + counts["errors"]
        passed = counts["tests"] - failed - counts["skipped"]
        result.counts = {"passed": passed, "failed": failed, "skipped": counts["skipped"]}
        if passed == 0 and result.outcome == "passed":
            result.outcome, result.note = "skipped", "every test was skipped; its log says why"
    shutil.rmtree(options.out / f"{name}.tmp", ignore_errors=True)
    return result


# -- steps ----------------------------------------------------------------------------------------------


def contract(options: Options) -> list[Result]:
    """Both servers at once, and the contract of both at once."""
    names = {"dense": ("TOLLWAY_SGLANG_URL", "sglang and not moe"), "moe": ("TOLLWAY_SGLANG_MOE_URL", "sglang-moe")}
    files = ["tests/contract/test_engine_contract.py", "tests/contract/test_ledger_on_sglang.py"]
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollway-gpu-models-")))
        started = time.monotonic()
        servers = []
        for name in names:
            servers.append(Server(name, options, models))
            stack.callback(servers[-1].end)
        limit_s = min(START_S, options.left_s() - LEAST_S)

        def held(server: Server) -> Result:
            variable, chosen = names[server.name]
            label = f"contract-{server.name}"
            if why := server.wait_until_it_generates(limit_s):
                say(why)
                return Result(label, "failed", time.monotonic() - started, note=why.splitlines()[0])
            ready_s = time.monotonic() - started
            say(f"{server.name} server: ready after {ready_s:.0f} s")
            select = f"({chosen}) and ({options.select})" if options.select else chosen
            env = {variable: server.url}
            result = run_pytest(label, [*files, "-k", select], options, 240.0, env)
            result.note = " ".join(filter(None, [result.note, f"server ready after {ready_s:.0f} s"]))
            status = server.process.poll()
            if status is not None:
                result.outcome, result.note = "failed", f"the server ended with status {status}: {server.log}"
                say(f"{result.note}\n{_tail(server.log, 25)}")
            return result

        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(held, servers))


def tests(options: Options) -> list[Result]:
    """Tests that need a device, less the long ones of the loop."""
    chosen = ["tests/gpu", "--ignore=tests/gpu/test_loop_on_gpu.py"]
    return [run_pytest("tests", [*chosen, *_select(options)], options, 400.0, _for_tests(options))]


def loop(options: Options) -> list[Result]:
    """The training loop on one device."""
    chosen = ["tests/gpu/test_loop_on_gpu.py", *_select(options)]
    return [run_pytest("loop", chosen, options, 900.0, _for_tests(options))]


def rollout(options: Options) -> list[Result]:
    """Output tokens behind the session server against the engines alone."""
    command = [sys.executable, "scripts/bench_rollout.py"]
    if options.cpu:
        command += shlex.split("--concurrent 4 --turns 2 --prompt 64 --new 16 --tool 16 --pairs 1")
    else:
        program = f"engine.executable={json.dumps(options.sglang)}"
        command += ["-c", "scripts/rollout_h200.toml", "--shape", "qwen3-0.6b", "--set", program, "--kill-one"]
        command += shlex.split("--concurrent 64 256 --turns 5 2 --prompt 512 --sessions-each 2 --exact-sessions 32")
    return [run("rollout", command, options, 580.0, {})]


def train(options: Options) -> list[Result]:
    """Steps of the Megatron backend."""
    small = ["--shape", "tiny", "--rows", "2", "--seq", "64", "--steps", "2", "--variants", "plain"]
    command = [sys.executable, "scripts/bench_train.py", *(small if options.cpu else ())]
    return [run("train", command, options, 400.0, {})]


RUNS: dict[str, Callable[[Options], list[Result]]] = {
    "contract": contract,
    "tests": tests,
    "loop": loop,
    "rollout": rollout,
    "train": train,
}


def _for_tests(options: Options) -> dict[str, str]:
    env = {"TOLLWAY_GPU_OUT": str(options.out)}
    return env | ({"TOLLWAY_GPU_CPU": "1"} if options.cpu else {"TOLLWAY_SGLANG": options.sglang})


def _select(options: Options) -> list[str]:
    return ["-k", options.select] if options.select else []


# -- words ----------------------------------------------------------------------------------------------

_saying = threading.Lock()


def say(text: str) -> None:
    """One piece of progress at once, though steps run side by side."""
    with _saying:
        print(text, flush=True)


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _reasons(log: Path) -> str:
    """What pytest says in short of each failure, or the end of any other output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line[:300] for line in lines if line.startswith(("E   ", "FAILED ", "ERROR "))]
    return "\n".join(errors[-40:] if errors else [line[:300] for line in lines[-25:]])


def _last_json(log: Path) -> object:
    last = _tail(log, 1)
    if not last.startswith("{"):
        return None
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        return None


def device(options: Options) -> str:
    """Name of the device. Raises ``SystemExit`` with what to do when this machine cannot run the checks."""
    if options.cpu:
        return "none: embedded engines on the CPU"
    if shutil.which(options.sglang) is None:
        raise SystemExit(
            f"gpu_check: there is no program {options.sglang!r}: install SGLang {NEEDED_RELEASE} or later in an "
            "environment of its own and give --sglang PATH/bin/sglang, or --cpu for embedded engines"
        )
    code = "import torch; print(torch.cuda.get_device_name(0), torch.__version__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"gpu_check: PyTorch sees no CUDA device here ({why}); --cpu runs with embedded engines")
    return found.stdout.strip()


def table(results: Sequence[Result]) -> str:
    """One line for each step."""
    rows = [f"{'step':16} {'outcome':10} {'s':>6} {'passed':>7} {'failed':>7} {'skipped':>8}  note"]
    for each in results:
        counts = [str(each.counts[key]) if each.counts else "-" for key in ("passed", "failed", "skipped")]
        rows.append(
            f"{each.name:16} {each.outcome:10} {each.seconds:>6.0f} {counts[0]:>7} {counts[1]:>7} {counts[2]:>8}  "
            f"{each.note}"
        )
    return "\n".join(rows)


def parse(argv: Sequence[str] | None) -> Options:
    """Read the command line. Ends the process with status 2 for a step that does not exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="embedded engines and small sizes, without a GPU")
    parser.add_argument("--sglang", default="sglang", metavar="PATH", help="its program (default: sglang)")
    parser.add_argument("--sglang-flags", default="", metavar="FLAGS", help="more flags of the contract's servers")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check", help="folder for logs and figures")
    parser.add_argument("--only", default=",".join(STEPS), metavar="STEP,...", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--select", default="", metavar="EXPR", help="pytest's -k for the steps that are tests")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="end everything within so many seconds")
    said = parser.parse_args(argv)
    only = tuple(said.only.split(","))
    if unknown := set(only) - set(STEPS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; steps are {', '.join(STEPS)}")
    return Options(
        cpu=said.cpu,
        sglang=said.sglang,
        flags=tuple(shlex.split(said.sglang_flags)),
        out=said.out.resolve(),
        only=only,
        select=said.select,
        ends=time.monotonic() + said.budget_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps that were asked for; see the module docstring."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    # A stop from outside runs the clean-up of every server and step that is open.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name, results = device(options), []
    say(f"device: {name}")
    for step in options.only:
        try:
            results += RUNS[step](options)
        except Exception as error:  # one step must not keep the others from running
            results.append(Result(step, "failed", note=f"{type(error).__name__}: {error}"))
    print("\n" + table(results))
    line = {
        "device": name,
        "ok": all(each.outcome in ("passed", "skipped") for each in results),
        "steps": {
            each.name: {
                "outcome": each.outcome,
                "seconds": round(each.seconds, 1),
                **each.counts,
                **({"note": each.note} if each.note else {}),
                **({"figures": each.figures} if each.figures else {}),
            }
            for each in results
        },
    }
    (options.out / "summary.json").write_text(json.dumps(line, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(line))
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
