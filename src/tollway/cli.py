"""The command line: parse, load the configuration, call one function of ``app``, render, set exit status.

Exit status: 0 done, 1 the run failed, 2 a wrong call or configuration (nothing was started), 130 stopped by
Ctrl-C. Heavy packages are imported by the command that needs them, never here.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tollway
from tollway import cli_cache, cli_engines, cli_episode, cli_router, cli_sandbox, cli_tasks, telemetry
from tollway.errors import ConfigError, EngineLost, SandboxUnavailable, TollwayError
from tollway.interrupts import EXIT_INTERRUPTED, EndingAtOnce, raise_on_signals
from tollway.settings import ADMIN_KEY_VARIABLE, Settings, admin_key, load_settings

__all__ = ["main"]

EXIT_FAILED, EXIT_USAGE = 1, 2

DESCRIPTION = """\
Train language-model agents by reinforcement without rewriting the agent.

Start here:
  scripts/demo                                    train a small agent on this machine, from nothing
  tollway doctor                                  what this machine can run, and what is missing
  tollway train -c examples/demo/tollway.toml     the same demo without the wrapper
  tollway episode run 3 --harness gold            one task, solved by its reference solution and graded
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.command is None:
        _parser().print_help()
        return EXIT_USAGE
    try:
        raise_on_signals()
        return int(arguments.run(arguments))
    except (ConfigError, SandboxUnavailable) as error:
        print(f"tollway: {error}", file=sys.stderr)
        return EXIT_USAGE
    except TollwayError as error:
        # The code of EngineLost speaks of engines, also where a server did not answer.
        code = "" if isinstance(error, EngineLost) else f"[{error.code}] "
        print(f"tollway: {code}{error}", file=sys.stderr)
        if arguments.command == "train":
            kept = "what was committed is kept; once the cause is gone, the same command goes on"
            print(f"tollway: {kept}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        resumes = "; the same command goes on, from the last checkpoint if there is one"
        with EndingAtOnce():  # all is released, and who asks a second time reads no more
            try:
                print(f"tollway: stopped{resumes if arguments.command == 'train' else ''}", file=sys.stderr)
            except BrokenPipeError:  # of a pipeline that Ctrl-C ended whole
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"tollway: {error}; make room, the same command continues from what is written", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tollway", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tollway {tollway.__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    train = _command(commands, "train", _train, "train the policy; the same command resumes an interrupted run")
    train.add_argument("--fresh", action="store_true", help="move an existing run directory aside and start over")

    cli_episode.add_eval_arguments(_command(commands, "eval", _eval, cli_episode.EVAL))
    cli_episode.add_episode_arguments(_command(commands, "episode", _episode, cli_episode.EPISODE))

    serve = _command(
        commands,
        "serve",
        _serve,
        "run the session server in front of running engines; the admin key comes from TOLLWAY_ADMIN_KEY",
    )
    serve.add_argument("--engine", action="append", default=[], metavar="URL", help="an engine (may repeat)")
    serve.add_argument(
        "--start-engines", type=int, default=0, metavar="N", help="start N engines as [engine] says, keep them running"
    )
    serve.add_argument("--host", help="address to listen on (default: server.host)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: server.port)")
    serve.add_argument("--workers", type=int, metavar="N", help="server processes (default: server.workers)")

    cli_cache.add_arguments(_command(commands, "cache", _cache, cli_cache.DESCRIPTION))

    engine = _command(commands, "engine", _engine, "run the embedded CPU engine, SGLang's HTTP surface")
    engine.add_argument("--model-path", metavar="DIR", help="Hugging Face model directory (default: engine.model_path)")
    engine.add_argument("--host", help="address to listen on (default: engine.host)")
    engine.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: engine.port)")

    config = _command(
        commands,
        "config",
        _config,
        "show: print the resolved tree (JSON, readable again with -c); check: keys, values, names",
    )
    config.add_argument("action", choices=["show", "check"])

    engines = _command(
        commands,
        "engines",
        _engines,
        "list, add, drain, undrain or remove engines of a running server; the admin key comes from TOLLWAY_ADMIN_KEY",
    )
    cli_engines.add_arguments(engines)

    doctor = _command(
        commands, "doctor", _doctor, "say what this machine can run, or whether a running server can serve, and why not"
    )
    doctor.add_argument("--url", help="ask the server at this address instead of looking at this machine")

    cli_router.add_arguments(_command(commands, "router", _router, cli_router.DESCRIPTION))

    cli_sandbox.add_arguments(_command(commands, "sandbox", cli_sandbox.run, cli_sandbox.DESCRIPTION))

    cli_tasks.add_arguments(_command(commands, "tasks", cli_tasks.run, cli_tasks.DESCRIPTION))

    listed = _command(commands, "families", _families, "list the model families that this installation knows")
    listed.add_argument("--json", action="store_true", help="print a JSON list instead of a table")

    verify = _command(
        commands,
        "verify-family",
        _verify_family,
        "prove one model family over its real vocabulary: token identity, append-only, streaming",
    )
    verify.add_argument("name", help="a name of `tollway families`")
    verify.add_argument("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or a model directory")
    verify.add_argument("--vocabulary", metavar="NAME", help="instead: qwen3, qwen3.5 or deepseek-v4, from packages")
    verify.add_argument("--chat-template", type=Path, metavar="FILE", help="the template of family jinja")
    verify.add_argument("--json", action="store_true", help="print a JSON list instead of a table")

    model = _command(commands, "new-model", _new_model, "write a model directory with random weights ([model.fresh])")
    model.add_argument("directory", type=Path)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: object, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    command.add_argument("-c", "--config", type=Path, metavar="FILE", help="configuration file (tollway.toml)")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, for example trainer.steps=5"
    )
    command.set_defaults(run=run)
    return command


def _settings(arguments: argparse.Namespace, **overrides: object) -> Settings:
    """Settings of this call; ``overrides`` are flags, which win over the file and ``--set``."""
    extra = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items() if value is not None]
    return load_settings(arguments.config, [*arguments.set, *extra])


def _train(arguments: argparse.Namespace) -> int:
    with EndingAtOnce():
        from tollway import runs
        from tollway.progress import training_view

    settings = _settings(arguments)
    with training_view(settings) as view:
        summary = runs.train(settings, fresh=arguments.fresh, report=view.on_event)
    view.show_summary(summary)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    return cli_episode.run_eval(arguments, _settings(arguments, **cli_episode.overrides(arguments)))


def _episode(arguments: argparse.Namespace) -> int:
    return cli_episode.run_episode(arguments, _settings(arguments, **cli_episode.overrides(arguments)))


def _serve(arguments: argparse.Namespace) -> int:
    with EndingAtOnce():
        from tollway.router.supervisor import die_with_parent
        from tollway.session_server.crew import component
        from tollway.session_server.server import run

    die_with_parent()
    settings = _settings(
        arguments, server__host=arguments.host, server__port=arguments.port, server__workers=arguments.workers
    )
    telemetry.configure(settings.run.log_level, component=component())
    if not os.environ.get(ADMIN_KEY_VARIABLE):
        raise ConfigError(
            f"set {ADMIN_KEY_VARIABLE}: whoever opens sessions needs the admin key; "
            f"for example export {ADMIN_KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    _check_engines(arguments)
    if arguments.start_engines:
        with EndingAtOnce():
            from tollway import app

        with contextlib.suppress(KeyboardInterrupt):  # it is meant to run until it is told to stop
            app.run_to_end(app.serve_with_engines(settings, arguments.start_engines))
        return 0
    run(settings.server, settings.router, admin_key=admin_key(), engine_urls=arguments.engine)
    return 0


def _check_engines(arguments: argparse.Namespace) -> None:
    """A wrong address on the command line is a wrong call: nothing is started for it."""
    from tollway.errors import BadRequest
    from tollway.router.addresses import check_url

    if arguments.start_engines < 0:
        raise ConfigError(f"--start-engines {arguments.start_engines}: want a number of engines, 0 for none")
    if arguments.start_engines and arguments.engine:
        raise ConfigError(
            "--engine and --start-engines exclude each other; add further engines with tollway engines add"
        )
    for url in arguments.engine:
        try:
            check_url(url)
        except BadRequest as error:
            raise ConfigError(f"--engine: {error}") from None


def _cache(arguments: argparse.Namespace) -> int:
    server = _settings(arguments).server
    return cli_cache.run(arguments, arguments.url or f"http://{server.host}:{server.port}")


def _engine(arguments: argparse.Namespace) -> int:
    with EndingAtOnce():
        from tollway.engine.server import run
        from tollway.router.supervisor import die_with_parent

    die_with_parent()
    settings = _settings(
        arguments, engine__model_path=arguments.model_path, engine__host=arguments.host, engine__port=arguments.port
    )
    telemetry.configure(settings.run.log_level, component="engine")
    run(settings.engine)
    return 0


def _router(arguments: argparse.Namespace) -> int:
    cli_router.run(arguments, _settings(arguments))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    if arguments.action == "show":
        print(settings.model_dump_json(indent=2))
    else:
        from tollway.app import check_names

        check_names(settings)
        print(f"{arguments.config or 'the default configuration'}: keys, values and names are known")
    return 0


def _engines(arguments: argparse.Namespace) -> int:
    server = _settings(arguments).server
    url = arguments.url or f"http://{server.host}:{server.port}"
    return 0 if cli_engines.run(arguments, url) else EXIT_FAILED


def _doctor(arguments: argparse.Namespace) -> int:
    from tollway.doctor import diagnose, show, show_server

    if arguments.url:
        return 0 if show_server(arguments.url, os.environ.get(ADMIN_KEY_VARIABLE, "")) else EXIT_FAILED
    return 0 if show(diagnose(_settings(arguments))) else EXIT_FAILED


def _families(arguments: argparse.Namespace) -> int:
    from tollway.family_report import show_families

    show_families(as_json=arguments.json)
    return 0


def _verify_family(arguments: argparse.Namespace) -> int:
    from tollway.family_report import show_verification
    from tollway.session_server.families.verify import open_family

    settings = _settings(arguments)
    tokenizer = arguments.tokenizer or (settings.server.tokenizer if arguments.vocabulary is None else None)
    family = open_family(
        arguments.name, tokenizer=tokenizer, vocabulary=arguments.vocabulary, chat_template=arguments.chat_template
    )
    return 0 if show_verification(family, as_json=arguments.json) else EXIT_FAILED


def _new_model(arguments: argparse.Namespace) -> int:
    from tollway.fresh_model import write_fresh_model

    settings = _settings(arguments)
    if settings.model.fresh is None:
        raise ConfigError("no [model.fresh] section: name the shape there, at least --set model.fresh.vocab_size=272")
    if (arguments.directory / "model.safetensors").exists():
        raise ConfigError(f"{arguments.directory} holds a model already; name another directory, or delete it first")
    write_fresh_model(arguments.directory, settings.model.fresh, seed=settings.run.seed)
    print(f"wrote {arguments.directory}/config.json and model.safetensors")
    return 0
