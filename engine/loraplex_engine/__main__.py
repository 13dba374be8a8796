"""`python -m loraplex_engine`: `pull` and `list` for bases, `check` and `serve` for an engine; `serve` starts `core`.

`inspect` says what an engine would compute with here, for `loraplex doctor`.

Only arguments are read here; each command imports what it runs, so that `pull` and `serve` start without torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from loraplex_engine.errors import BaseUnavailableError, EngineError
from loraplex_engine.flags import add_engine_flags, build_config
from loraplex_registry.wire.naming import InvalidNameError
from loraplex_registry.wire.setting import SettingError, read_settings

_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130
_CACHE_HELP = "default: LORAPLEX_CACHE_DIR or ~/.cache/loraplex"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (EngineError, SettingError, InvalidNameError) as error:
        print(f"loraplex engine: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_engine", description="The engine of Loraplex.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_pull(commands.add_parser("pull", help="fetch a base model onto this machine"))
    _add_list(commands.add_parser("list", help="list the bases of this machine's cache"))
    _add_serve(commands.add_parser("serve", help="serve one base and its adapters"), run=_run_serve)
    _add_serve(
        commands.add_parser(
            "check", help="judge the flags and settings of serve, print what they limit; start nothing"
        ),
        run=_run_check,
    )
    inspect = commands.add_parser("inspect", help="print as JSON what an engine would compute with here; start nothing")
    inspect.set_defaults(run=_run_inspect)
    core = commands.add_parser("core", help="the model process; started by serve, reads its settings on standard input")
    core.set_defaults(run=_run_core)
    return parser


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="folder, hub id, .gguf file, or the name smollm2-135m")
    parser.add_argument("--to", type=Path, metavar="DIR", help="keep it here instead of in the cache")
    parser.add_argument("--served-model-name", default="", metavar="NAME", help="name it this")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help=_CACHE_HELP)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON on standard output")
    parser.set_defaults(run=_run_pull)


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help=_CACHE_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_list)


def _add_serve(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--base", metavar="FOLDER_OR_NAME", help="the base; default: LORAPLEX_ENGINE_BASE")
    parser.add_argument("--listen", metavar="HOST:PORT", help="default: LORAPLEX_LISTEN or 127.0.0.1:8100")
    parser.add_argument("--registry-url", metavar="URL", help="where adapters come from")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help=_CACHE_HELP)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def _run_pull(args: argparse.Namespace) -> int:
    from loraplex_engine.bases.folder import load_marker, load_spec
    from loraplex_engine.bases.progress import RichProgress
    from loraplex_engine.bases.pull import pull

    settings = read_settings(os.environ, "engine")
    with RichProgress() as progress:
        folder = pull(args.spec, _cache_dir(args, settings), progress, to=args.to, name=args.served_model_name)
    spec = load_spec(folder)
    if args.json:
        facts = {name: getattr(spec, name) for name in ("name", "fingerprint", "weights_digest", "accepted_names")}
        print(json.dumps({"folder": str(folder), "digest": load_marker(folder).digest, **facts}))
    else:
        print(f"{spec.name} is in {folder}")
    return 0


def _run_list(args: argparse.Namespace) -> int:
    from loraplex_engine.bases.folder import list_bases, load_marker, load_spec

    bases = [
        {
            "name": spec.name,
            "accepted_names": spec.accepted_names,
            "from": load_marker(folder).origin.spec,
            "context": spec.default_context,
            "fingerprint": spec.fingerprint,
            "digest": load_marker(folder).digest,
            "folder": str(folder),
        }
        for folder in list_bases(_cache_dir(args, read_settings(os.environ, "engine")))
        for spec in (load_spec(folder),)
    ]
    if args.json:
        print(json.dumps(bases, indent=2))
    for base in () if args.json else bases:
        print(f"{base['name']}  context {base['context']}  {base['folder']}  (from {base['from']})")
    return 0


def _run_check(args: argparse.Namespace) -> int:
    settings = read_settings(os.environ, "engine")
    config = build_config(args, settings, Path(), _cache_dir(args, settings))
    print(json.dumps({"max_lora_rank": config.max_lora_rank}))
    return 0


def _run_inspect(_: argparse.Namespace) -> int:
    from loraplex_engine.loop.inspection import inspect_machine

    settings = read_settings(os.environ, "engine")
    cache_dir = Path(settings["cache_dir"]).expanduser().absolute()
    rows = inspect_machine(cache_dir, uses_native=settings["native"] != "0")
    print(json.dumps([row._asdict() for row in rows]))
    return 0


def _run_serve(args: argparse.Namespace) -> int:
    settings = read_settings(os.environ, "engine")
    cache_dir = _cache_dir(args, settings)
    config = build_config(args, settings, _find_base(args, settings, cache_dir), cache_dir)
    from loraplex_engine.server.process import main as serve

    return serve(config, {**settings, **({"listen": args.listen} if args.listen else {})})


def _run_core(_: argparse.Namespace) -> int:
    from loraplex_engine.loop.process import main as core

    return core()


def _cache_dir(args: argparse.Namespace, settings: dict[str, str]) -> Path:
    return Path(args.cache_dir or settings["cache_dir"]).expanduser().absolute()


def _find_base(args: argparse.Namespace, settings: dict[str, str], cache_dir: Path) -> Path:
    from loraplex_engine.bases.folder import find_base

    wanted = args.base or settings.get("engine_base")
    if not wanted:
        raise BaseUnavailableError("Say which base to serve: --base FOLDER_OR_NAME.")
    folder = find_base(wanted, cache_dir)
    if folder is None:
        raise BaseUnavailableError(f"The base {wanted!r} is not on this machine; run `loraplex base pull {wanted}`.")
    return folder


if __name__ == "__main__":
    sys.exit(main())
