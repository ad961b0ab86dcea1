"""The command ``hybrid``. One table lists the commands; errors become exit codes in one place.

Nothing here or at the top of a command's file imports torch: ``hybrid --help`` stays instant.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybrid import __version__
from hybrid.errors import HybridError
from hybrid.tui.text import clean

# Command name -> where it is: a function, or a typer.Typer with commands of its own.
COMMANDS = {
    "generate": "hybrid.cli.generate:generate",
    "chat": "hybrid.cli.chat:chat",
    "bench": "hybrid.cli.bench:bench",
    "eval": "hybrid.cli.eval:evaluate",
    "sweep": "hybrid.cli.sweep:sweep",
    "explain": "hybrid.cli.explain:explain",
    "calibrate": "hybrid.cli.calibrate:calibrate",
    "data": "hybrid.cli.data:app",
    "train": "hybrid.cli.train:app",
    "export": "hybrid.cli.export:export",
    "models": "hybrid.cli.models:app",
    "doctor": "hybrid.cli.doctor:doctor",
    "list": "hybrid.cli.listing:list_names",
    "plan-memory": "hybrid.cli.memory:plan_memory",
}

_EXAMPLES = """Examples:

  hybrid chat

  hybrid generate "Why is the sky blue?" --stats

  git diff | hybrid generate - --system "Summarise this change." --json

  hybrid models pull default
"""


class _Group(TyperGroup):
    """Turns what a command raises into an exit code: 1 an error, 2 wrong usage, 130 Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except HybridError as error:
            # A message may quote a checkpoint or a file: no control characters.
            typer.echo(f"Error: {clean(' '.join(str(error).split()))}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader left; Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            # A full disk, say: what is still buffered cannot be written either.
            typer.echo(f"Error: {clean(str(error))}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EXAMPLES,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"hybrid-decoder {__version__}")
        raise typer.Exit


@app.callback()
def _hybrid(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Generate text with one model that drafts by diffusion and verifies autoregressively."""


def _mount() -> None:
    """Add the commands."""
    for name, place in COMMANDS.items():
        module, _, attribute = place.partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, epilog=getattr(sys.modules[module], "EXAMPLES", None))(command)


_mount()


def main() -> None:
    """Run the command line. What an encoding lacks is read and written as a replacement."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="hybrid")
