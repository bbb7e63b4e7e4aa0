"""`espalier <command> ...`, also `python -m espalier`: a command is the `main` of a module, imported when called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from espalier.version import __version__

#: Module of each command, and what it does.
COMMANDS = {
    "run": ("espalier.harness.cli.run", "evaluate a method on a model and a benchmark, or sweep"),
    "explore": ("espalier.harness.cli.explore", "two methods answer a question, in a browser"),
    "sweep": (
        "espalier.harness.cli.sweep",
        "status of a sweep, on any machine that sees its store",
    ),
    "store": ("espalier.harness.cli.store", "list, show, check, clean and export stored results"),
    "serve": ("espalier.harness.cli.serve", "what a stored run needs on a server of vLLM"),
    "report": ("espalier.harness.cli.report", "one page of all results, for a browser"),
    "curves": ("espalier.harness.cli.curves", "accuracy against tokens kept, as pictures"),
    "tables": ("espalier.harness.reports.tables.rebuild", "published tables, rebuilt from results"),
    "benchmarks": ("espalier.harness.cli.benchmarks", "list, check and prefetch benchmarks"),
    "calibrate": ("espalier.harness.cli.calibrate", "the numbers that a method needs of a model"),
    "convert": ("espalier.harness.cli.convert", "a released model to a checkpoint that loads here"),
    "wandb": ("espalier.harness.cli.wandb", "upload results that were logged offline"),
    "doctor": ("espalier.harness.cli.doctor", "check this machine and what it computes"),
}

#: What to write for commands of other programs.
MEANT = {"eval": "run", "evaluate": "run", "ls": "store ls"}

#: What bash evaluates to complete commands, and overrides of runs: Hydra answers for a line without the word `run`.
COMPLETION = """\
_espalier() {
    local word=${COMP_WORDS[COMP_CWORD]} line="espalier ${COMP_LINE#*run }" words="COMMANDS"
    if [ "$COMP_CWORD" -gt 1 ]; then
        [ "${COMP_WORDS[1]}" = run ] || return
        compopt -o nospace 2> /dev/null
        words=$(COMP_LINE=$line COMP_POINT=${#line} espalier run -sc query=bash 2> /dev/null)
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o default -F _espalier espalier
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit code 2 and one line if there is none of that name.

    Without `argv` the command line is that of this process, which ends with the returned code.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments == ["--version"]:
        print(f"espalier {__version__}")
        return 0
    if arguments == ["--completion"]:
        print(COMPLETION.replace("COMMANDS", " ".join(COMMANDS)), end="")
        return 0
    modules = {name: module for name, (module, _) in COMMANDS.items()}
    try:
        # Imported here: Ctrl-C while the program is still being imported is one line, too.
        from espalier.harness.specs.commands import dispatch, run_process

        command = partial(dispatch, "command", modules, usage(), arguments, MEANT)
        return run_process(command) if argv is None else command()
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130


def usage() -> str:
    """Return what `espalier --help` prints."""
    listed = "\n".join(f"  {name:<11} {what}" for name, (_, what) in COMMANDS.items())
    return f"""\
usage: espalier <command> ...
       espalier --version | --completion

commands:
{listed}

`espalier <command> --help` shows what to type. Without network or GPU, on the embedded model:
  espalier run method=fastv ratio=0.9 limit=20
  espalier store ls"""


if __name__ == "__main__":
    sys.exit(main())
