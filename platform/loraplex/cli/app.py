"""The root of the `loraplex` command: what there is, and what becomes of errors. Modules are imported when used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import Parameter as Argument
from inspect import signature
from typing import Any

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter

from loraplex.version import __version__

_EXAMPLES = """\
Try it:

  loraplex up --demo                              four answers in one batch
  loraplex up                                     a platform on this machine
  loraplex tenants create team-x                  in another terminal
  loraplex adapters push ./my-adapter --as team-x
  loraplex chat --model team-x "Hello!"

Clients read LORAPLEX_URL and LORAPLEX_API_KEY, and without them
use the platform that `up` runs for this user on this machine.
"""
_BY_POSITION = Argument.POSITIONAL_ONLY
_RUN = Group("Run", sort_key=0)
_MANAGE = Group("Manage", sort_key=1)
_USE = Group("Use", sort_key=2)
_COMMANDS = (
    ("up", "loraplex.cli.up:up", _RUN, "Run everything on this machine: gateway, registry, engine."),
    ("gateway", "loraplex.cli.parts:gateway", _RUN, "Run the gateway with the registry."),
    ("engine", "loraplex.cli.parts:engine", _RUN, "Run one engine."),
    ("db", "loraplex.cli.db:app", _RUN, "Bring the database to this program's revision."),
    ("base", "loraplex.cli.base:app", _RUN, "Fetch and list base models."),
    ("backup", "loraplex.cli.backup:app", _RUN, "Back up a platform, verify it, restore it."),
    ("tenants", "loraplex.cli.tenants:app", _MANAGE, "Create and change teams."),
    ("keys", "loraplex.cli.keys:app", _MANAGE, "Create and revoke API keys."),
    ("adapters", "loraplex.cli.adapters:app", _MANAGE, "Upload, promote, roll back and retire adapters."),
    ("escalations", "loraplex.cli.escalations:app", _MANAGE, "Let one adapter become a full fine-tune, by exception."),
    ("usage", "loraplex.cli.usage:app", _MANAGE, "Sum up tokens and requests."),
    ("audit", "loraplex.cli.audit:audit", _MANAGE, "List who did what."),
    ("status", "loraplex.cli.status:status", _MANAGE, "Say what runs and what it serves."),
    ("doctor", "loraplex.cli.doctor:doctor", _MANAGE, "Say what is not as it must be, and what to do about it."),
    ("config", "loraplex.cli.config:app", _MANAGE, "Show every setting and where it comes from."),
    ("advise", "loraplex.cli.advise:advise", _MANAGE, "Say what to change, and why."),
    ("plan", "loraplex.cli.plan:plan", _MANAGE, "Say what bases and adapters need on a card, before you buy one."),
    ("chat", "loraplex.cli.chat:chat", _USE, "Talk to a model."),
    ("bench", "loraplex.cli.bench:bench", _USE, "Measure a server: throughput, times, errors, and what changed."),
)
_COMMAND_EXAMPLES = {
    "up": "loraplex up --demo\n  loraplex up --base ./Qwen2.5-0.5B-Instruct --max-loras 16 --port 8000",
    "gateway": "LORAPLEX_DATABASE_URL=... LORAPLEX_OBJECT_STORE_URL=... loraplex gateway --listen 127.0.0.1:8080",
    "engine": "loraplex engine --base smollm2-135m --listen 127.0.0.1:8100 --registry-url http://127.0.0.1:8080",
    "audit": "loraplex audit --tenant team-x --action alias.set\n  loraplex audit --request req_ab3de...",
    "status": "loraplex status --json",
    "doctor": "loraplex doctor\n  LORAPLEX_DATABASE_URL=... loraplex doctor --part gateway --json",
    "advise": "loraplex advise\n  loraplex advise --tenant team-x --json",
    "plan": "loraplex plan --model llama-3.1-8b --adapters 40 --rank 16 --modules q,k,v,o --gpu h100-80g\n"
    "  loraplex plan --model ./my-model --adapter-dir ./adapters --gpu 24GiB --max-model-len 8192",
    "bench": "loraplex bench --model team-x --concurrency 16 --html bench.html\n"
    "  loraplex bench --model team-x --rate 4 --slo ttft=0.5,itl=0.05\n"
    "  loraplex bench --url http://127.0.0.1:8000 --model base --sweep",
    "chat": 'loraplex chat --model team-x "Hello!"\n  loraplex chat --model team-x/support@2 --temperature 0',
}
_COMMAND_DETAILS = {
    "gateway": "Until SIGTERM; for setups of several machines. Its settings are LORAPLEX_* variables, LORAPLEX_POOLS "
    "among them, which names the engines. Before it: loraplex db upgrade.",
    "engine": "Until SIGTERM, with one base. It takes calls from gateways alone: LORAPLEX_VERIFY_KEYS is the gateway's "
    "public key, and LORAPLEX_ENGINE_KEY, the same as the gateway's, lets it read adapters. Name it in the gateway's "
    "LORAPLEX_POOLS, and make its base known once: loraplex base register.",
}


def build_app() -> App:
    """Return the command tree; commands are named here and imported when they run."""
    app = App(
        name="loraplex",
        help="Forty tunes, one copy: many teams' LoRA adapters served over one base model.",
        help_epilogue=_EXAMPLES,
        help_format="plaintext",
        version=__version__,
        suppress_keyboard_interrupt=False,
        default_parameter=Parameter(show_default=False),
    )
    for i, (name, where, group, summary) in enumerate(_COMMANDS):
        example = _COMMAND_EXAMPLES.get(name)
        epilogue = {"help_epilogue": f"Examples:\n\n  {example}\n"} if example else {}
        text = "\n\n".join((summary, *filter(None, [_COMMAND_DETAILS.get(name)])))
        app.command(where, name=name, group=group, help=text, sort_key=i, **epilogue)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 only on success, 2 for a wrong call, 130 for Ctrl-C."""
    app = build_app()
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in tokens
    try:
        result = app(tokens, exit_on_error=False, print_error=not as_json, result_action="return_value")
    except CycloptsError as error:
        usage = _build_usage(error)
        if as_json:
            _print_json_error(f"{error} {usage}".strip(), "wrong_call")
        elif usage:
            sys.stderr.write(f"{usage}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - each part has its own tree of errors; faults are raised again
        return _explain(error, as_json=as_json)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _build_usage(error: CycloptsError) -> str:
    """Return all that a command wants by position, where a part of it is missing: the error names only the last."""
    if not isinstance(error, MissingArgumentError) or error.target is None or error.argument is None:
        return ""
    if error.argument.field_info.kind is not _BY_POSITION:
        return ""
    wanted = [
        parameter.name.upper() if parameter.default is parameter.empty else f"[{parameter.name.upper()}]"
        for parameter in signature(error.target).parameters.values()
        if parameter.kind is _BY_POSITION
    ]
    return f"Usage: {' '.join(('loraplex', *(error.command_chain or ()), *wanted))}" if wanted else ""


def _explain(error: Exception, *, as_json: bool) -> int:
    """Print an error that has words for its reader; others are faults of this program and keep their trace."""
    message = getattr(error, "message", None)
    if not isinstance(message, str):
        raise error
    code, param, report = (getattr(error, name, None) for name in ("code", "param", "report"))
    if as_json:
        _print_json_error(message, code or "", param, report)
    else:
        from loraplex.cli.output import fail, stderr
        from loraplex.cli.report import print_report

        fail(message, code=code or "", param=param)
        if report is not None:
            print_report(stderr(), report)
    return int(getattr(error, "exit_code", 1))


def _print_json_error(message: str, code: str, param: str | None = None, report: Any = None) -> None:
    """Print an error in the API's shape as one line, the last one on standard error."""
    import msgspec

    error = {"error": {"message": message, "code": code, "param": param}}
    body = msgspec.json.encode(error if report is None else error | {"report": report})
    sys.stderr.write(body.decode() + "\n")
