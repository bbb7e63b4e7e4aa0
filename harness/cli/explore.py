"""Ask a model about a picture with two methods side by side, on a page of this machine.

A picture, a question and the share of visual tokens kept are chosen in a browser; the page shows both answers and that
of the unpruned model, what was kept, and what it cost. Overrides choose what it starts with: model, method and ratio,
and settings of the model, `model.dtype=bfloat16`. Ctrl-C ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.errors import UserError, print_lines
from espalier.harness.specs.commands import command, command_parser

#: Keys that an override may set, with those of the model.
KEYS = ("model", "method", "ratio", "offline")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until it is interrupted; exit code 2 and one line if that fails."""
    parser = command_parser(
        "explore", __doc__, "", "photo.jpg model=llava_ov_7b method=divprune ratio=0.75"
    )
    parser.add_argument("words", nargs="*", metavar="[picture] key=value", help="see above")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    options = parser.parse_args(argv)
    has_picture = options.words and "=" not in options.words[0]
    picture, *overrides = options.words if has_picture else (None, *options.words)
    for override in overrides:
        key = override.partition("=")[0]
        if key not in KEYS and not key.startswith("model."):
            raise UserError(
                f"explore: {override!r} is not a setting of this page; valid: {', '.join(KEYS)} and model.<key>"
            )
    # Imported here: torch and gradio take seconds, and --help needs neither.
    from espalier.harness.api.loaded_models import load_spec
    from espalier.harness.api.questions import opened_picture
    from espalier.harness.config.compose import read_command
    from espalier.harness.config.model_section import model_spec
    from espalier.harness.specs.hub_cache import go_offline
    from espalier.harness.tools.explore import explore

    (cell,) = read_command(overrides, typed=True).cells
    chosen = dict(override.split("=", 1) for override in overrides)
    spec = model_spec(cell["model"])
    # A model takes minutes to load: a picture that cannot be opened is refused first.
    first = None if picture is None else opened_picture(picture, spec.transparency)
    method = chosen.get("method", cell["method"]["name"])
    go_offline()  # but for what `load_spec` downloads
    model = load_spec(spec, cell["offline"])
    page = explore(model, first, method=method, ratio=cell["ratio"])
    try:
        _, address, _ = page.launch(server_port=options.port, prevent_thread_lock=True)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port={options.port} is in use, or no port; valid: another, or none for the first free one"
        ) from error
    print_lines(address)
    page.block_thread()
    return 0
