"""`wingbeat COMMAND ...`: finds the command, reads its flags and file, runs it, turns errors into exit codes.

Exit codes: 0 ok, 1 failed, 2 bad usage (flag, file, model, request), 3 a comparison was refused or found a regression.
Command modules are imported when chosen, so `wingbeat --help` needs neither torch nor a second of patience.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from wingbeat import __version__
from wingbeat.config import as_flags, describe, read_settings, split_config_flag, trace_origins
from wingbeat.errors import CheckpointError, ConfigError, RequestError, WingbeatError, unknown_name

OK, FAILED, USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives: `module` holds the dataclass `config` and `run(config) -> exit code`."""

    module: str
    config: str
    help: str
    announce: bool = False
    """Print every setting with its origin before the command starts."""


COMMANDS = {
    "serve": Command("serve", "Serve", "OpenAI-compatible server", announce=True),
    "generate": Command("generate", "Generate", "complete one prompt in process"),
    "bench single": Command("bench", "BenchSingle", "latency of one stream at a time, over HTTP"),
    "bench parallel": Command("bench", "BenchParallel", "throughput against concurrency, over HTTP"),
    "report": Command("report", "Report", "one HTML page and picture from a finished run"),
    "compare": Command("compare", "Compare", "two runs, refused where they are not comparable"),
    "demo": Command("demo", "Demo", "serve, sweep, report: does speculation pay here?"),
    "doctor": Command("doctor", "Doctor", "what this machine has, and what will therefore be used"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; the value is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except WingbeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError | CheckpointError | RequestError) else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain once more while flushing at exit.
        sys.stdout = None
        return FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return OK if arguments else USAGE
    if arguments[0] in ("version", "--version"):
        print(f"wingbeat {__version__}")
        return OK
    name, rest = find_command(arguments)
    if name is None:
        print(usage(arguments[0]))
        return OK
    return _run(name, rest)


def find_command(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The command's name (one or two words) and the arguments after it; None when help on a group was asked for."""
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in COMMANDS:
            return name, arguments[length:]
    group = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if group and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        return None, []
    wrong = " ".join(arguments[:2]) if group else arguments[0]
    raise unknown_name("command", wrong, group or [*COMMANDS, "version"])


def usage(group: str = "") -> str:
    """The table of commands, or of one group."""
    chosen = {name: c for name, c in COMMANDS.items() if name.startswith(group)}
    lines = [f"  {name:<16}{command.help}" for name, command in chosen.items()]
    if not group:
        lines.append(f"  {'version':<16}print the version")
    tail = "Flags of a command: wingbeat COMMAND --help.  Any command takes --config FILE.toml; flags override it."
    return "\n".join(["usage: wingbeat COMMAND [flags]", "", *lines, "", tail])


def _run(name: str, arguments: list[str]) -> int:
    import tyro

    command = COMMANDS[name]
    module = _load(name, command)
    config_class: type = getattr(module, command.config)
    path, flags = split_config_flag(arguments)
    settings = read_settings(path, config_class) if path is not None else {}
    try:
        config: object = tyro.cli(
            config_class,
            args=as_flags(settings) + flags,
            prog=f"wingbeat {name}",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit as end:  # tyro has printed help (0) or what was wrong (2)
        return end.code if isinstance(end.code, int) else USAGE
    if command.announce:
        print(describe(trace_origins(config, set(settings), flags)), file=sys.stderr)
    return int(module.run(config))


def _load(name: str, command: Command) -> Any:
    """The command's module; a missing extra becomes an error that says what to install."""
    try:
        return import_module(f"wingbeat.cli.{command.module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("wingbeat"):
            raise
        raise ConfigError(
            "command", name, f"it needs the package {error.name}: pip install 'wingbeat[engine]'"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
