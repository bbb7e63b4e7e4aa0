"""Command lines: doors, overrides, values, paths, templates, and places that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from tests.fuzz.case import CELLS, HERE, KEY, STORE, Case, run

#: What only looks at a config, or sweeps.
DOORS = (
    *(("--cfg", "job"), ("-c", "job"), ("--help",), ("-h",), ("--cfg=job", "--resolve")),
    *(("-m",), ("--multirun", "--dry"), ("--dry",)),
)

#: No command line is right with one of these.
MISTAKES = (
    *("nosuch=1", "method=nosuch", "=1", "ratio", "seed=[", "~nosuch", "+method=fastv", "a..b=1"),
    *("model.nosuch=1", "seed.x=1", "benchmark=task:nosuch", "++method=fastv", "hydra.nosuch=1"),
    *("method={a:b}", "+experiment=nosuch", "experiment=quickstart", "method@x=fastv", "$"),
    *("hydra.searchpath=[file:///etc]", "seed=range(0,9,0)", "seed=interval(0,1)", "model=../x"),
    *("hydra.mode=nosuch", "seed=glob(*)", "method=glob(5)", "seed=choice()", "ratio=half=1"),
    *("hydra.searchpath=[nosuch://x]", "hydra.searchpath=5", "+hydra.sweeper.params.x=1,2", "@=1"),
)

#: Flags that go with nothing, or not with each other.
FLAGS = (
    *(("--cfg",), ("--cfg", "nosuch"), ("--nosuch",), ("--info", "nosuch"), ("--resolve",)),
    *(("--package", "x"), ("--cfg", "job", "--package", "no.such"), ("--config-dir", "/nosuch")),
    *(("--multirun", "--cfg", "job"), ("--cfg", "job", "--info"), ("-m", "--run"), ("-sc", "x=y")),
    *(("--cells",), ("--cells", "/no/such"), ("--cells", "/"), ("--experimental-rerun", "x")),
    *(("-m", "seed=range(0,1e9)"), ("-m", "seed=range(0,inf)"), ("-m", "grids=[{a:b}]")),
    *(("-m", "seed=shuffle(range(0,100000000))"), ("-m", "grids=7"), ("grids=[{ratio:0.5}]",)),
    *(("--cfg", "job", "ratio=0.1,0.2"), ("ratio=0.1,0.2",), ("-m", "+hydra.sweeper.params={a:1}")),
)

KEYS = (
    *("ratio", "keep", "seed", "limit", "force", "offline", "store", "curves", "report", "refused"),
    "json",
    *(
        "compressor.ratio",
        "compressor.variant",
        "compressor.params",
        "method.params",
        "method.name",
    ),
    *("method.variant", "budget.rule", "engine.batch_size", "engine.threads", "engine.positions"),
    *("engine.share", "engine.prefetch", "engine.decode", "engine.graphs", "lease.beat", "judge"),
    *("judge.base_url", "judge.timeout", "judge.options", "judge.key_env", "judge.prompt", "log"),
    *("log.samples", "log.options", "model.path", "model.facts", "model.video", "model.prompt"),
    *("model.prompts", "model.dtype", "model.device", "model.scale", "model.processor", "model"),
    *("model.conversation", "model.generation", "model.max_memory", "model.drafts", "cluster"),
    *("cluster.memory", "cluster.options", "cluster.poll", "cluster.cpus", "benchmark.path"),
    *("benchmark.task", "benchmark.text", "benchmark.texts", "benchmark.dataset", "benchmark.kind"),
    *("benchmark.generation", "benchmark.metrics", "benchmark.sources", "benchmark.include_path"),
)

VALUES = (
    *("[]", "{}", "null", "-1", "0", "1e400", "nan", "''", "true", "3.7", "[1,[2,{a:3}]]", "{a:b}"),
    *("'\x1b[2J\x07'", "${nothing}", "${oc.env:NOSUCH}", "???", "'" + "x" * 5000 + "'", "'a\nb'"),
    *("99999999999999999999999", "/dev/zero", "'../../../../x'", "'\u202eabc'", "${..x}", "'\\'"),
)

#: Values that say nothing, or nothing that there is.
WRONG = (
    *(("cluster.memory=0",), ("cluster.gpu_memory=0GiB",), ("cluster.memory=-5GiB",)),
    *(("compressor.variant=other",), ("compressor=h2o", "compressor.variant=5")),
    *(("+model.prompts.mine=5",), ("+model.prompts.mine={nosuch:1}",)),
    *(("+benchmark.texts.nosuch=a",), ("log.samples=3",), ("+log.options.project=a",)),
    *(("model=seedling_diffusion", "engine.decode=generate"), ("model.conversation=nosuch",)),
    *(("model.facts.projector=x",), ("model.facts.projector=[0]",), ("model.facts.projector=[a]",)),
    *(("log=wandb", "log.options.tags=5"), ("log=wandb", "log.options.project=[a]")),
    *(("log=wandb", "+log.options.mode=sometimes"), ("log=wandb", "+log.options.entity={a:1}")),
    ("model=seedling_diffusion", "+benchmark.generation.max_new_tokens=1000000"),
    ("model=seedling_diffusion", "+benchmark.generation.max_new_tokens=400"),
    *(("+benchmark.generation.temperature=0.9",), ("+model.generation.top_p=0.5",)),
    *(("+benchmark.generation.length_penalty=2.0",), ("+benchmark.generation.max_length=9",)),
    *(("+benchmark.generation.low_memory=true",), ("+benchmark.generation.stop_strings=[a]",)),
    *(("keep=1e-9%",), ("keep=1000000000000",)),
    *(("judge.base_url='http://exa mple/v1'",), ("judge.base_url='http://a b'",)),
    *((f"judge.options={{api_key: {KEY}}}",), (f"+judge.options.api_key={KEY}",)),
    *((f"judge.options.token={KEY}",), (f"judge.key_env={KEY}",), ("lease.beat=-1",)),
    *(
        ("benchmark=pope", "model.closed_vocabulary=false", f"benchmark.path={place}")
        for place in ("/proc", "/", "/sys", "/dev")
    ),
    *((f"benchmark.include_path={place}",) for place in ("/proc", "/", "/dev/null", "/no/such")),
    *((f"model.path={place}",) for place in ("/proc", "/dev/null", "/no/such", "/", HERE)),
    *(("store=/dev/null/x", "seed=1=2"), ("benchmark.sources=[/proc]",), ("model.join=nosuch",)),
)

SIGNS = "=()[]{}#&;!~'\"$%^*|<>?@+:. `-\u00fc\u6570"

TEMPLATES = (
    *("{{ 'x' * 10**%d }}", "{{ 10**%d * [0] }}", "{%% for i in range(10**%d) %%}{%% endfor %%}"),
    "{{ 2 ** (10**%d) }}",
)

BROKEN_TEMPLATES = (
    *("{{ 1/0 }}", "{{", "{% if %}", "{{ nosuch }}", "{% include 'x' %}", "{{ ''.__class__ }}"),
    *("{{ 5|nosuch }}", "{{ -'a' }}", "{{ cycler() }}", "{{ 'a'.index('b') }}", "{{ 9.0**9999 }}"),
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
)

#: Where nothing can be written.
PLACES = ("/proc/x", "/proc/x/y", "/dev/null/x", f"{HERE}/file/x", f"{HERE}/file/../file/x")


def lines(dice: Random) -> Iterator[Case]:
    """Yield the cases of this module, those with a choice drawn anew."""
    looks = [(door, mistake) for door, mistake in product(DOORS, MISTAKES)]
    for door, mistake in dice.sample(looks, 60):
        words = [*door, mistake]
        # A flag and its value stay together; the mistake stands anywhere, a right override at the end.
        parts = [tuple(door), (mistake,), ("ratio=0.5",)]
        dice.shuffle(parts)
        words = [word for part in parts for word in part]
        planned = "--dry" in door
        sweeps = "-m" not in door and "--multirun" not in door
        refusable = sweeps or not mistake.startswith(("seed=range(0,9,0)", "method=glob(5)"))
        yield run("doors", *words, refused=refusable and not planned)
    yield from (run("flags", *flags, refused=True) for flags in FLAGS)
    for key, value in dice.sample([*product(KEYS, VALUES)], 70):
        yield run("overrides", f"{key}={value}", "--dry")
    yield from (run("values", *CELLS, *line, refused=True) for line in WRONG)
    for key in 3 * ("store", "model.path", "benchmark.path", "judge.prompt", "curves"):
        sign, other = dice.choice(SIGNS), dice.choice(SIGNS)
        yield Case("paths", "call:path", (key, f"/d/a{sign}b{other}c"))
        yield Case("paths", "call:path", (key, f"rel{sign}{other}/d"))
    for template in TEMPLATES:
        yield Case("templates", "call:template", (template % dice.randint(9, 12),), refused=True)
    yield from (Case("templates", "call:template", (text,), True) for text in BROKEN_TEMPLATES)
    yield run("templates", *CELLS, "benchmark.text=\"{{ 'x' * 10**10 }}\"", refused=True)
    yield from _outputs(dice)
    yield from _commands(dice)


def _outputs(dice: Random) -> Iterator[Case]:
    yield Case(
        "outputs", "run", ("method=none", *CELLS, f"curves={HERE}/c", f"store={STORE}"), served=True
    )
    for place in PLACES:
        yield run("outputs", *CELLS, f"curves='{place}'", refused=True)
        yield run("outputs", *CELLS, f"report='{place}'", refused=True)
        yield Case("outputs", "run", (*CELLS, f"store='{place}'"), refused=True)
        module, flag = dice.choice(
            [
                ("espalier.harness.cli.curves", "--out"),
                ("espalier.harness.reports.tables.rebuild", "--out"),
                ("espalier.harness.cli.report", "--out"),
            ]
        )
        named = {"curves": ("--benchmarks", "seedling_vqa"), "rebuild": ("d2pruner", "1")}
        more = named.get(module.rpartition(".")[2], ())
        yield Case("outputs", module, (*more, "--store", STORE, flag, place), refused=True)
        yield Case(
            "outputs", "espalier.harness.cli.store", ("export", place, "--store", STORE), True
        )


def _commands(dice: Random) -> Iterator[Case]:
    """Yield commands on stores that are none, and cleaning up by words that name nothing."""
    for store in ("/no/such", "/etc/passwd", "/dev/null"):
        for module, words in (
            ("reports.tables.rebuild", ("d2pruner", "1")),
            ("cli.curves", ("--benchmarks", "pope", "--out", f"{HERE}/x")),
            ("reports.curves.cache_report", ("--write", f"{HERE}/x")),
            ("reports.tables.anchors", ()),
            ("cli.report", ("--out", f"{HERE}/x.html")),
            ("cli.wandb", ("--dry",)),
            ("cli.store", ("ls",)),
            ("cli.sweep", ("status",)),
        ):
            yield Case(
                "stores", f"espalier.harness.{module}", (*words, "--store", store), refused=True
            )
    for words in (("--positions", "nosuch"), ("--limit", "-1"), ("--model", "nosuch")):
        yield Case(
            "options",
            "espalier.harness.reports.tables.rebuild",
            ("d2pruner", "1", *words),
            refused=True,
        )
    yield Case("options", "espalier.harness.reports.tables.rebuild", ("nosuch",), refused=True)
    benchmarks = ("--benchmarks", dice.choice(["", ",", "nosuch"]))
    yield Case(
        "options",
        "espalier.harness.cli.curves",
        (*benchmarks, "--out", f"{HERE}/x", "--store", STORE),
        True,
    )
    letters = "".join(dice.choice("0123456789abcdef") for _ in range(12))
    for commit in ("", "HEAD", "zzz", "0", letters, letters * 4, "*", "../..", "%", "-dirty", " "):
        line = ("gc", "--store", STORE, "--yes", f"--keep-code={commit}")
        yield Case("cleaning", "espalier.harness.cli.store", line, refused=True)
    for days in ("-1", "nan", "inf", "x", "1e400"):
        line = ("gc", "--store", STORE, "--yes", f"--days={days}")
        yield Case(
            "cleaning", "espalier.harness.cli.store", line, refused=days in ("-1", "nan", "x")
        )
