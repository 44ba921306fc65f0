"""The command `privet`. Each module of this folder that has a NAME is one subcommand, found by itself.

Such a module defines `NAME`, `HELP`, `add_arguments(parser)` and `main(args) -> int`. All are imported for the list of
commands, so heavy imports (torch takes seconds) stand inside of its functions, which are called for the one command
that was given.
"""

from __future__ import annotations

import argparse
import errno
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ..errors import ConfigError, PrivetError

_EXAMPLES = """\
examples:
  privet train                                   train on the embedded digits, in under a minute
  privet train --data mnist --data-dir DIR --epsilon 3
  privet plan --records 60000 --batch 256 --epochs 60 --epsilon 3 --delta 1e-5
  privet budget runs/digits.ledger               what all runs on a data set have cost together
"""
_IN_PYTHON = re.compile(r"\b(relation|noise_level)='(\w+)'")
"""How errors of the library spell what is an option here."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done; 1: a claim is broken, or a fault of ours; 2: it could not be; 130: interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(given).parse_args(given)
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except PrivetError as error:
        return _fail(_IN_PYTHON.sub(lambda said: f"--{said[1].replace('_', '-')} {said[2]}", str(error)))
    except BrokenPipeError:
        # Whoever read our output has left. What is still buffered must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(_about_files(error))
    except KeyboardInterrupt:
        return _fail("Interrupted.", code=130)
    except Exception as error:
        if os.environ.get("PRIVET_DEBUG"):
            raise
        said = " ".join(str(error).split())
        return _fail(
            f"Something happened that Privet has no answer to: {type(error).__name__}: {said[:300]}. A training that "
            "had begun goes on with --resume. PRIVET_DEBUG=1 shows where it happened: please report that.",
            code=1,
        )


def _fail(message: str, code: int = 2) -> int:
    print(f"privet: {message}", file=sys.stderr)
    return code


def _about_files(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full{where}: free some space. A training that had begun goes on with --resume."
    return f"{error.strerror or error}{where}."


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    from .. import __version__  # noqa: PLC0415

    parser = _Parser(
        prog="privet",
        description="Train models on sensitive records with differential privacy that you can check.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"privet {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = next((word for word in given if not word.startswith("-")), None)
    for module in _modules():
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if wanted == module.NAME:
            module.add_arguments(command)
            command.set_defaults(command=module.main)
    return parser


def _modules() -> list[Any]:
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    found = [import_module(f"{__name__}.{name}") for name in names]
    return [module for module in found if hasattr(module, "NAME")]
