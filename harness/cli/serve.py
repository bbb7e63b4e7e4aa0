"""Serve a measured setting with vLLM and the plug-in of this package (docs/serve.md).

`setting`: what a stored run needs on a server to prune as it did: the server's command, and what each request holds
beside its messages, exact to the digit. A run that vLLM cannot serve is one line with the reason. vLLM is not needed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.errors import print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.store.stored_answers import find_run, finished_row


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the setting of a run; exit code 2 and one line if it cannot be served."""
    parser = command_parser("serve", __doc__, "setting 1f3a", "setting 1f3a --store other --json")
    commands = parser.add_subparsers(dest="command", required=True)
    setting = commands.add_parser("setting", help="what a stored run needs on a server")
    setting.add_argument("key", help="run key, or its beginning")
    setting.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    setting.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(argv)
    # Imports torch.
    from espalier.harness.runs.served.served_row import served_row

    served = served_row(finished_row(find_run(options.store, options.key)))
    if options.json:
        values = {"server": served.server, "request": served.request, "measured": served.measured}
        print_lines(json.dumps({**values, "notes": served.notes}))
        return 0
    server = served.server
    words = ["vllm", "serve", server["model"] or "FOLDER_OF_THE_CHECKPOINT", *server["options"]]
    print_lines(
        shlex.join(words),
        json.dumps(served.request),
        "measured with "
        + ", ".join(f"{name} {version}" for name, version in served.measured.items()),
        *(f"note: {note}" for note in served.notes),
    )
    return 0
