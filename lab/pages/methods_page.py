"""docs/methods.md, written from the code: `python -m lab.pages.methods_page [--write docs/methods.md]`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from types import ModuleType

from espalier.harness.config.group_lists import choices
from espalier.harness.config.method_names import MethodName, former_names
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.paths import CONF, ROOT
from espalier.harness.specs.catalogue import METHODS, build_method, names_of
from espalier.harness.specs.commands import command
from espalier.methods.base import Decoder, Method, Site, TokenReducer
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.readings import readings_of
from lab.pages.page_writer import print_or_write, table
from lab.pages.proofs import Subject, kinds_of

#: Layers of the model on the page: LLaVA-1.5 7B runs 23 tower blocks and 32 decoder layers.
BLOCKS, DEPTH = 23, 32

HEAD = """\
# Methods

Generated from the code and the config files with `python -m lab.pages.methods_page --write docs/methods.md`; a test
checks that it is up to date. [Differences](#differences) lists what each method follows and where it departs from that;
the docstring of its file has the rest.

A method follows its paper (`paper`) or released code (`official`). `method=NAME` runs `official` wherever released code
is followed, else `paper`; [config files](#config-files) shows which. Command line, Python and vLLM take this and all
hyper-parameters from `conf/method/NAME.yaml`. In results a method with both readings has the reading after its name.

`acts at` lists the sites for the default settings on LLaVA-1.5 7B: {blocks} tower blocks and {depth} decoder layers.
`reads` lists the [signals](#signals). `cost` is the cost of choosing tokens, without what the
model computes anyway. N: visual tokens, T: text tokens, D: width of the decoder, Dk and Dh: width of a key, H: heads.

Four shared test files cover every method of the first table except `none`:

- `tests/methods/test_all.py`: the contract (counts, order, schedules, batches, half precision, ties, NaN);
- `tests/methods/test_matrix.py`: tiny models of thirteen real architectures (two for methods of videos, three for those
  inside the tower), three budget rules, pruning compared with emulation;
- `tests/methods/test_sites.py`: the layers, signals and shares that papers state;
- `tests/methods/test_signals.py`: planted scores, for methods that score tokens.

`own tests` lists further tests of the method and what they use: a slow version (the same steps, written out in the
test), worked examples, published figures, a planted signal, further runs of tiny models.
"""

DECODERS = """\
## Decoders

Decoders change neither the target's tokens nor its answers: a draft proposes tokens, the target verifies them. The
ratio is the share of visual tokens hidden from the draft, if the decoder hides any.

- `rounds`: with `in turn`, the target waits for the draft; with `at once`, the draft continues while the target
  verifies.
- `window`: number of tokens drafted per round; `auto` is as many as the draft generates in one step of the target.
- `target is read at`, `reads`: sites and signals of the target, for {depth} layers; layer {depth} means after the last.
- `cost`: the cost of choosing the draft's tokens. L: decoder layers.

`tests/methods/test_decoders.py` tests all decoders, `tests/methods/test_decoders_choice.py` those that choose tokens.
"""

COMPRESSORS = """\
## Cache compressors

A compressor runs after the full prefill, so the first token of an answer still depends on the whole prompt. In each
layer it evicts the lowest-scoring visual entries of the KV cache and keeps the text entries. The ratio is the share of
visual entries evicted, averaged over layers. Every score works with every budget rule, for example
`method=h2o method.params.allocation=lorenz`. With `method.params.scope=prompt`, text entries may be evicted too, except
the first and last slots given in the last column. L: tokens of the prompt, w and E: tokens of a window.

`tests/methods/test_compressors.py` compares scores with full attention maps, and budgets with worked examples.
`tests/engine/test_eviction.py` compares answers with those of the full cache with the evicted entries masked, in six
families.
"""

DENOISERS = """\
## Denoisers

These methods are for diffusion language models (`model.facts.diffusion`) and choose visual tokens again at each step;
`redvtp` and `fastv_first_step` choose once, in the first. A site inside a layer (`block`) is between its attention,
which still sees all tokens, and its MLP. The ratio is the mean over all steps except the first, which is not pruned;
for `pyramiddrop_denoising` it sets the shares of the stages at every step. Methods of the first table that act after
the projector also work on these models, at every step including the first ([details](diffusion.md)).

`tests/methods/test_d3tom.py` compares selection and merging with the equations, token by token; `test_denoising.py`
tests the meaning of the ratio. `tests/diffusion` compares the engine's steps with a double-precision reference, and
full answers with a plain loop.
"""

CONFIGS = """\
## Config files

Select a method with `python run.py method=<file>`. Methods with entries in both of the last two columns have two
variants: `method.variant=official` (default) follows the released code, `method.variant=paper` the paper. Others have
the one named. To run both in one sweep: `-m method=fastv method.variant=paper,official`.
"""

DIFFERENCES = """\
## Differences

What each method follows where paper and code leave a choice, and where it departs from that, as stated in its file.
Methods without a line depart in nothing that is known.
"""

#: The mark of a paragraph in a method's docstring that the page lists under `Differences`.
DIFFERS = "Differs: "

FORMER_NAMES = """\
`<method>_official` and `<method>_paper` are aliases for a method with this variant. These other names of earlier
versions still work:
"""


def page(root: Path = ROOT) -> str:
    """Return the page: a table of reducers, one per other kind of method, and one of config files."""
    folder = root / "tests" / "methods"
    tests = {
        path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("test_*.py"))
    }
    reducers = [_reducer_row(name, tests) for name in names_of(TokenReducer)]
    head = ("method", "acts at", "reads", "cost", "paper", "own tests")
    decoders = [_decoder_row(name) for name in names_of(Decoder)]
    compressors = [_compressor_row(name) for name in names_of(CacheCompressor)]
    denoisers = [_reducer_row(name, tests) for name in names_of(DenoisingReducer)]
    evicts = ("compressor", "budgets", "heads choose", "cost", "paper", "first, last slots")
    ways = ("decoder", "who drafts", "rounds", "window", "draft sees", "target is read at", "reads")
    files = [_file_row(CONF / "method" / f"{name}.yaml") for name in choices("method")]
    differences = [f"- `{name}`: {text}" for name in METHODS.names() for text in _differences(name)]
    former = [_former_name_row(name, setting) for name, setting in sorted(former_names().items())]
    return "\n".join(
        [
            HEAD.format(blocks=BLOCKS, depth=DEPTH),
            table(head, reducers),
            DECODERS.format(depth=DEPTH),
            table((*ways, "cost", "paper"), decoders),
            COMPRESSORS,
            table(evicts, compressors),
            DENOISERS,
            table(head, denoisers),
            "## Signals\n",
            "What a method may read beyond the tokens: it returns `Need(name)` from `needs` and reads "
            "`view.signals[name]`.\n",
            table(
                ("signal", "shape and meaning"), ((f"`{name}`", SIGNALS[name]) for name in SIGNALS)
            ),
            CONFIGS,
            table(("method", "what it is", "`official`", "`paper`"), files),
            DIFFERENCES,
            *differences,
            "",
            FORMER_NAMES,
            table(("former name", "written now"), former),
        ]
    )


def _reducer_row(name: str, tests: dict[str, str]) -> tuple[str, ...]:
    method = build_method(name, {})
    assert isinstance(method, TokenReducer)  # guaranteed by the name
    sites = method.all_sites(BLOCKS, DEPTH)
    step = method.decode_site(DEPTH)
    every = (*sites, step) if step else sites
    module = _module(method)
    return (
        _link(name, module),
        places(every),
        _signals(method, every),
        _cost(type(method).plan),
        _paper(module),
        _own_tests(Subject(name, type(method).__name__), module, tests),
    )


def _decoder_row(name: str) -> tuple[str, ...]:
    method = build_method(name, {})
    assert isinstance(method, Decoder)  # guaranteed by the name
    draftless = method.source == "nobody"
    levels = f"tree of {len(method.tree)} on {method.window} levels"
    rounds = "at once" if method.overlap else "in turn"
    sites = method.sites(DEPTH)
    return (
        _link(name, _module(method)),
        {"nobody": "nobody", "model": "a draft model", "cache": "the target"}[method.source],
        "-" if draftless else rounds,
        "-" if draftless else levels if method.tree else str(method.window),
        "-" if draftless else _draft_view(method),
        places(sites),
        _signals(method, sites),
        _cost(type(method).choose),
        _paper(_module(method)),
    )


def _compressor_row(name: str) -> tuple[str, ...]:
    method = build_method(name, {})
    assert isinstance(method, CacheCompressor)  # guaranteed by the name
    first, last = method.exempt
    return (
        _link(name, _module(method)),
        method.allocation.replace("_", " "),
        "apart" if method.by_head else "together",
        _cost(type(method).score),
        _paper(_module(method)),
        f"{first}, {last}",
    )


def _draft_view(method: Decoder) -> str:
    if method.text_only:
        return "words alone"
    if method.guided:
        return "words, and what the target chooses" + " in each layer" * (method.source == "cache")
    return "what it keeps by itself" if method.reducer else "everything"


def _module(method: Method) -> ModuleType:
    module = inspect.getmodule(type(method))
    assert module is not None
    return module


def _link(name: str, module: ModuleType) -> str:
    return f"[{name}](../{module.__name__.removeprefix('espalier.').replace('.', '/')}.py)"


def _signals(method: Method, sites: Iterable[Site]) -> str:
    reads = {need.signal for site in sites for need in method.needs(site)}
    return ", ".join(f"`{signal}`" for signal in sorted(reads)) or "-"


def places(sites: Iterable[Site]) -> str:
    """Return sites as text, grouped by kind: `vision`, `layers 8, 16, 24`, `tower 0 to 22`."""
    parts = []
    for where, group in groupby(sites, key=lambda site: site.where):
        layers = [site.layer for site in group]
        if where in ("vision", "prefix"):
            parts.append(where)
            continue
        if layers == [-1]:
            parts.append("before the tower")
            continue
        word = "decoding from layer" if where == "decode" else where
        plural = "s" if where == "layer" and len(layers) > 1 else ""
        parts.append(f"{word}{plural} {_run_of(layers)}")
    return ", ".join(parts) or "-"


def _run_of(layers: Sequence[int]) -> str:
    steps = {after - before for before, after in pairwise(layers)}
    if len(layers) > 4 and len(steps) == 1:
        (step,) = steps
        by = "" if step == 1 else f" by {step}"
        return f"{layers[0]} to {layers[-1]}{by}"
    return ", ".join(map(str, layers))


def _cost(rule: Callable[..., object]) -> str:
    match = re.search(r"Cost: (.*?)(?:\n\s*\n|$)", inspect.getdoc(rule) or "", re.S)
    return " ".join(match[1].split()).rstrip(".") if match else "-"


def _paper(module: ModuleType) -> str:
    """Return the title's sentence up to the closing bracket, with a link to arXiv if it has an id."""
    first = (inspect.getdoc(module) or "").split("\n\n")[0]
    match = re.search(
        r"\(([^()]*\b(?:19|20)\d\d[^()]*|[^()]*arXiv[^()]*)\)", " ".join(first.split())
    )
    if match is None:
        return "control"
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", match[1])


def _own_tests(subject: Subject, module: ModuleType, tests: dict[str, str]) -> str:
    """Return the test files of the method, each with its kinds of comparison.

    Files have the method's name; for methods without one, the files that import or declare them.
    """
    named = f"test_{module.__name__.rpartition('.')[2]}"
    imported = re.compile(
        rf"^from {re.escape(module.__name__)} import|check_method\(\s*\"{subject.name}\"",
        re.MULTILINE,
    )
    files = [file for file in tests if file.startswith((f"{named}.", f"{named}_"))]
    shared = ("test_rules.py", "test_sites.py")
    files = files or [file for file in shared if imported.search(tests[file])]
    cells = []
    for file in files:
        kinds = ", ".join(kinds_of(tests[file], subject))
        cells.append(f"[{file}](../tests/methods/{file})" + (f": {kinds}" if kinds else ""))
    return "; ".join(cells) or "-"


def _differences(name: str) -> list[str]:
    """Return where a method departs from what it follows, by the paragraphs of its file that are marked so."""
    text = inspect.getdoc(_module(build_method(name, {}))) or ""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    marked = (part.removeprefix(DIFFERS) for part in paragraphs if part.startswith(DIFFERS))
    return [part[0].upper() + part[1:] for part in marked]


def _file_row(path: Path) -> tuple[str, ...]:
    text = path.read_text(encoding="utf-8")
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(filter(None, (line.lstrip("# ") for line in lines)))
    readings = dict(re.findall(r"^  (official|paper): # (.+)$", text, re.MULTILINE))
    file = readings_of(path.stem)
    assert file is not None  # every file here has the name of its method
    if not file.variants and _paper(_module(build_method(path.stem, {}))) != "control":
        readings = {file.default: "the only reading"}
    return f"`{path.stem}`", comment, readings.get("official", "-"), readings.get("paper", "-")


def _former_name_row(name: str, setting: MethodName) -> tuple[str, ...]:
    return f"`{name}`", f"`{setting.overrides('method')}`"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    return print_or_write(page, "lab.pages.methods_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
