"""The store's index: its rows, and the scores of its samples, in one DuckDB file beside the runs that they come from.

A reader works on its own copy of the file, brings that up to date and, if enough has changed, renames it into the
place of the file. So no process waits for another, and the file system needs no locks. A file that is damaged, foreign
or of other code ends in another digest; it is made anew. While a run's `row.json` keeps its time, size and inode, it is
not opened again; a damaged one is read each time.
"""

from __future__ import annotations

import gc
import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from itertools import accumulate, groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple, TypeVar

import duckdb
from duckdb import DuckDBPyConnection as Connection

from espalier.harness.errors import FOREIGN, StoreLost, UserError, first_words, tell_once
from espalier.harness.store import RunDir, Unreadable, access_error, folders_in
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import Digests, digest, read_bytes

NAME = "index.duckdb"

#: Bytes of the digest at the end of the file.
DIGEST = 16

#: The file is replaced when at least one row in this many is not in it; reading fewer takes less time.
STALE = 100

#: Bytes of rows, and number of scores, that are stored together.
BATCH, SCORES = 8 * 2**20, 100_000

#: Number of results of shared objects that are remembered.
SHARED = 8192

#: Bytes of memory of queries, and how many more storing a row takes for each of its bytes.
MEMORY, MEMORY_PER_BYTE = 200_000_000, 12

#: Rows that are compressed together; more take more memory.
ROW_GROUP = 8192

EXTRA = "extra"

#: Entries of a row that readers ask for, with a column each: of its top level and of `extra`. Others are looked up in
#: the whole row, which takes longer.
BLOCKS = (
    *("model", "method", "variant", "benchmark", "ratio", "budget_rule", "keep", "seed"),
    *("n_samples", "metrics", "tokens", "flops", "time", "memory", "settings"),
    *("extra.label", "extra.headline", "extra.higher_is_better", "extra.aggregation"),
    *("extra.environment", "extra.unparsed", "extra.samples_per_second", "extra.params"),
    *("extra.sites", "extra.speculative", "extra.speedup", "extra.acceptance", "extra.latency"),
    *("extra.cache", "extra.diffusion", "extra.discriminates", "extra.first_token", "extra.costs"),
    *("extra.code", "extra.plugins", "extra.time_iqr"),
)

#: Blocks of much text.
WIDE = ("settings", "extra.aggregation", "extra.environment")

#: Content of the file; `results` and `samples` are for queries of users (docs/rows.md).
TABLES = f"""
create table rows(
    run_key varchar, committed double, mtime_ns bigint, size bigint, inode ubigint,
    row varchar using compression zstd,
    {", ".join(f'"{name}" json' + " using compression zstd" * (name in WIDE) for name in BLOCKS)}
);
create table metrics(run_key varchar, metric varchar, score double, stderr double);
create table journals(run_key varchar, stamp varchar);
create table samples(
    run_key varchar, task varchar, doc_id bigint, metric varchar, score double, unit bigint
);
create view results as
    select run_key, model->>'$' as model, benchmark->>'$' as benchmark, method->>'$' as method,
        variant->>'$' as variant, "extra.label"->>'$' as label, ratio::double as ratio,
        try_cast(keep as bigint) as keep, budget_rule->>'$' as budget_rule,
        try_cast(seed as bigint) as seed, try_cast(n_samples as bigint) as n_samples,
        metric, metric = "extra.headline"->>'$' as headline,
        score, stderr, make_timestamp((committed * 1000000)::bigint) as committed,
        tokens, flops, time, memory, settings, row->'extra' as extra
    from metrics join rows using (run_key);
"""

#: Adds rows: the first has parameters.
ADD_ROWS = (
    f"""
    create or replace temp table batch as
        select * exclude (blocks),
            {", ".join(f'blocks[{place}] as "{name}"' for place, name in enumerate(BLOCKS, 1))}
        from (
            select *, try(json_extract(row, {[f"$.{name}" for name in BLOCKS]})) as blocks
            from (
                select unnest($1) as run_key, unnest($2) as committed, unnest($3) as mtime_ns,
                    unnest($4) as size, unnest($5) as inode, unnest($6) as row
            )
        )
        where blocks is not null
    """,
    """
    insert into metrics
        select run_key, metric.key, metric.value.value, metric.value.stderr
        from (
            select run_key, unnest(map_entries(from_json(metrics,
                '"MAP(VARCHAR, STRUCT(value DOUBLE, stderr DOUBLE))"'))) as metric
            from batch
        )
    """,
    "insert into rows from batch",
)

Row = Mapping[str, Any]


class ReadRun(NamedTuple):
    """A run and the blocks read from its row.

    Attributes:
        runs: the folder of the store's runs.
        key: its key.
        committed: when the row was committed, in seconds.
        row: the requested blocks, with the objects that rows share; None if there is no row, or it cannot be read.
        problem: why it cannot be read.
    """

    runs: Path
    key: str
    committed: float = 0.0
    row: Row | None = None
    problem: Unreadable | None = None

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.runs / self.key


#: A function that yields the runs of a store with some blocks of their rows, as `walk` does.
Walk = Callable[[Path, Collection[str]], Iterable[ReadRun]]


def walk(
    store: Path, block_names: Collection[str], only: Collection[str] | None = None
) -> Iterator[ReadRun]:
    """Yield the runs of a store, ordered by key; with `only`, those of these keys.

    Args:
        store: its folder; one without runs yields nothing.
        block_names: entries of the rows, such as `metrics`, and those of `extra`, such as `extra.label`.
        only: keys of runs.

    Cost: one stat per run, and what `open_index` reads.
    """
    runs = store / "runs"
    keys = [key for key in folders_in(runs) if only is None or key in only]
    if not keys:
        return
    with open_index(store, only) as index, _without_collection():
        indexed = _blocks(index.connection, runs, block_names)
    for key in keys:
        yield indexed.pop(key) if key in indexed else _unindexed(ReadRun(runs, key))


def walk_once(block_names: Collection[str]) -> Walk:
    """Return a `walk` for several readers: a store is read once, with the first one's blocks and these."""
    read: dict[Path, list[ReadRun]] = {}

    def runs(store: Path, first_names: Collection[str]) -> list[ReadRun]:
        if store not in read:
            read[store] = list(walk(store, sorted({*first_names, *block_names})))
        return read[store]

    return runs


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage for a while: among the tables of many rows there is none, and looking takes as long again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _blocks(connection: Connection, runs: Path, block_names: Iterable[str]) -> dict[str, ReadRun]:
    """Return the blocks of all rows, by key; equal blocks of two rows are one object."""
    lines = connection.execute("select rowid, run_key, committed from rows").fetchall()
    extras: dict[int, dict[str, Any]] = {place: {} for place, _, _ in lines}
    _add_blocks(connection, extras, [name for name in block_names if "." in name])
    # Most rows have the same objects, and so can have the same table of them.
    shared: dict[tuple[Any, ...], dict[str, Any]] = {}
    rows: dict[int, dict[str, Any]] = {}
    for place, key, _ in lines:
        extra = extras.pop(place)
        rows[place] = {
            "run_key": key,
            EXTRA: shared.setdefault((*extra, *map(id, extra.values())), extra),
        }
    top_names = [name for name in block_names if "." not in name and name != "run_key"]
    _add_blocks(connection, rows, top_names)
    return {key: ReadRun(runs, key, committed, rows[place]) for place, key, committed in lines}


def _add_blocks(
    connection: Connection, tables: Mapping[int, dict[str, Any]], block_names: Iterable[str]
) -> None:
    """Add blocks to the tables of rows, by the last part of their names; equal ones of two rows are one object."""
    for name in block_names:
        column = f'"{name}"' if name in BLOCKS else f"json_extract(row, '$.{name}')"
        last = name.rpartition(".")[2]
        query = connection.execute(
            f"select {column} as block, list(rowid) from rows where block is not null group by block"
        )
        while groups := query.fetchmany(ROW_GROUP):
            # Parsing one long text takes less time than many short ones.
            values = json.loads(f"[{','.join(text for text, _ in groups)}]")
            for value, (_, places) in zip(values, groups, strict=True):
                for place in places:
                    tables[place][last] = value


def _unindexed(run: ReadRun) -> ReadRun:
    """Return a run that is not in the index: without a row, or with one that cannot be read or stored."""
    path, committed = run.path, 0.0
    try:
        committed = os.stat(path / "row.json").st_mtime
        return run._replace(committed=committed, row=RunDir(path).row())
    except (FileNotFoundError, NotADirectoryError):
        return run
    except Unreadable as error:
        return run._replace(committed=committed, problem=error)
    except OSError as error:  # of another user, or a link to itself
        with suppress(OSError):
            committed = path.stat().st_mtime
        return run._replace(committed=committed, problem=access_error(path, error))


class OpenIndex(NamedTuple):
    """A copy of a store's index that is up to date, the number of runs that were read for it, and rows that are not."""

    connection: Connection
    read: int
    problems: Sequence[Unreadable]


@contextmanager
def open_index(
    store: Path, only: Collection[str] | None = None, samples: bool = False
) -> Iterator[OpenIndex]:
    """Yield a copy of the index, which may be changed.

    Args:
        store: its folder.
        only: keys of the runs with rows that must be up to date; None: all.
        samples: whether the scores of samples must be, too.

    Raises:
        UserError: the folder of temporary files does not take the copy.

    Cost: one stat per run, and three more for its journal; files that changed are read.
    """
    with (
        TemporaryDirectory(prefix="espalier-") as folder,
        closing(duckdb.connect(config={"threads": 4, "temp_directory": folder})) as connection,
    ):
        try:
            index = _updated(connection, store, Path(folder, NAME), only, samples)
        except (OSError, duckdb.Error) as error:
            raise UserError(
                f"store={str(store)!r}: its index cannot be made in {gettempdir()!r} ({first_words(error)}); "
                "valid: a folder with more room, in TMPDIR"
            ) from error
        yield index


def _updated(
    connection: Connection, store: Path, copy: Path, only: Collection[str] | None, samples: bool
) -> OpenIndex:
    """Return a copy of the index that is up to date; it replaces the file if much has changed."""
    copied = _copied(store / NAME, copy)
    connection.execute(f"attach {quoted(copy)} as store (row_group_size {ROW_GROUP}); use store")
    # In one transaction, which writes whole row groups at once.
    connection.execute("begin")
    if not copied:
        connection.execute(TABLES)
    problems: list[Unreadable] = []
    read, changed = _update_rows(connection, store / "runs", only, problems)
    if samples:
        scored = _update_samples(connection, store / "runs")
        read, changed = read | scored, changed or bool(scored)
    connection.execute("commit")
    if changed:
        connection.execute("checkpoint")
        content = copy.read_bytes()
        # Without the file the next reader takes longer but reads the same.
        with suppress(StoreLost):
            durable.replace(store / NAME, content + _digest(content))
    if only is not None:
        query = "delete from rows where run_key not in (select unnest($1))"
        connection.execute(query, [[*only]])
    return OpenIndex(connection, len(read), problems)


def quoted(path: Path) -> str:
    """Return a path as a text of SQL."""
    return "'" + str(path).replace("'", "''") + "'"


def _copied(path: Path, copy: Path) -> bool:
    """Copy the index unless it is missing or cannot be used; return whether it was copied."""
    try:
        content = memoryview(read_bytes(path))
    except FOREIGN:
        return False
    intact = content[-DIGEST:] == _digest(content[:-DIGEST])
    if intact:
        copy.write_bytes(content)
    return intact


def _digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=DIGEST, key=_code()).digest()


@cache
def _code() -> bytes:
    """Return a digest of the code that makes and reads the file."""
    folder = Path(__file__).parent
    files = Digests().files(folder.rglob("*.py"), folder)
    return digest([files, duckdb.__version__]).encode()


def _update_rows(
    connection: Connection,
    runs: Path,
    only: Collection[str] | None,
    problems: list[Unreadable],
) -> tuple[set[str], bool]:
    """Store the rows that changed; return the keys of runs that were read, and whether many have changed."""
    present = set(folders_in(runs))
    wanted = present if only is None else present.intersection(only)
    stamps: dict[str, tuple[Any, ...]] = {}
    for key in wanted:
        with suppress(OSError):
            state = os.stat(f"{runs}/{key}/row.json")
            stamps[key] = (state.st_mtime, state.st_mtime_ns, state.st_size, state.st_ino)
    former = _stamps(connection, "rows", "committed, mtime_ns, size, inode")
    removed_keys = [
        key
        for key in former
        if key not in present or (key in wanted and stamps.get(key) != former[key])
    ]
    _remove(connection, removed_keys, "rows", "metrics")
    fresh = sorted(key for key in stamps if stamps[key] != former.get(key))
    changes = len(removed_keys)
    largest = max((stamps[key][2] for key in fresh), default=0)
    connection.execute(f"set memory_limit = '{MEMORY + MEMORY_PER_BYTE * largest}B'")

    def read_lines(keys: Iterable[str]) -> list[tuple[Any, ...]]:
        lines = []
        for key in keys:
            try:
                row = RunDir(runs / key).row()
            except Unreadable as error:
                problems.append(error)
                continue
            if row is not None and key.isascii():
                lines.append((key, *stamps[key], json.dumps(row)))
        return lines

    ends = accumulate(stamps[key][2] for key in fresh)
    by_batch = groupby(zip(fresh, ends, strict=True), lambda pair: pair[1] // BATCH)
    batches = [[key for key, _ in pairs] for _, pairs in by_batch]
    # DuckDB stores a batch while Python reads the next one.
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(read_lines, batches[0] if batches else ())
        for keys in (*batches[1:], ()):
            lines, upcoming = upcoming.result(), reader.submit(read_lines, keys)
            changes += add_rows(connection, lines)
    return set(fresh), changes * STALE >= max(len(former), 1)


def add_rows(connection: Connection, lines: Sequence[tuple[Any, ...]]) -> int:
    """Store the key, time, stamp and JSON of rows; return their number, without those of text that is no UTF-8."""
    if not lines:
        return 0
    first, *further_queries = ADD_ROWS
    connection.execute(first, [list(column) for column in zip(*lines, strict=True)])
    for query in further_queries:
        (count,) = connection.execute(query).fetchone() or (0,)
    return int(count)


def _update_samples(connection: Connection, runs: Path) -> set[str]:
    """Store the scores of journals that changed; return the keys of their runs."""
    stamps: dict[str, tuple[Any, ...]] = {}
    for (key,) in connection.execute("select run_key from rows").fetchall():
        try:
            states = [(path, os.stat(path)) for path in RunDir(runs / key).journal.files()]
        except OSError as error:
            tell_once(f"passed over: run {runs / key}: {first_words(error)}")
            continue
        files = [(p.name, s.st_mtime_ns, s.st_size, s.st_ino) for p, s in states]
        stamps[key] = (json.dumps(files),)
    former = _stamps(connection, "journals", "stamp")
    _remove(connection, [k for k in former if stamps.get(k) != former[k]], "journals", "samples")
    fresh = sorted(key for key in stamps if stamps[key] != former.get(key))
    intact: list[str] = []
    lines = _scores(runs, fresh, intact)
    while batch := list(islice(lines, SCORES)):
        add_samples(connection, batch)
    if intact:
        connection.execute(
            "insert into journals select unnest($1), unnest($2)",
            [intact, [stamps[key][0] for key in intact]],
        )
    return set(fresh)


def add_samples(connection: Connection, lines: Sequence[tuple[Any, ...]]) -> None:
    """Store lines of `samples`."""
    columns = ", ".join(f"unnest(${place})" for place in range(1, 7))
    connection.execute(
        f"insert into samples select {columns}",
        [list(column) for column in zip(*lines, strict=True)],
    )


def _scores(
    runs: Path, keys: Iterable[str], intact: list[str]
) -> Iterator[tuple[str, str, int, str, float, int]]:
    """Yield the lines of `samples`, the last scoring of each sample; keys of intact journals go to `intact`."""
    for key in keys:
        lines = {}
        try:
            for entry in RunDir(runs / key).journal.entries():
                for metric, score in entry.get("scores", {}).items():
                    task, unit = entry["task"], entry.get("units", {}).get(metric, entry["doc_id"])
                    # DuckDB takes numbers of 64 bits, and texts that are UTF-8.
                    sample, unit = array("q", (entry["doc_id"], unit))
                    (task + metric).encode()
                    lines[task, sample, metric] = (key, task, sample, metric, float(score), unit)
        except FOREIGN as error:
            reason = first_words(error)
            tell_once(f"passed over: run {runs / key}: its journal is damaged ({reason})")
            continue
        yield from lines.values()
        intact.append(key)


def _stamps(connection: Connection, table: str, columns: str) -> dict[str, tuple[Any, ...]]:
    lines = connection.execute(f"select run_key, {columns} from {table}").fetchall()
    return {line[0]: line[1:] for line in lines}


def _remove(connection: Connection, keys: list[str], *tables: str) -> None:
    for table in tables if keys else ():
        connection.execute(f"delete from {table} where run_key in (select unnest($1))", [keys])


Result = TypeVar("Result")


def memoized(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Return a function that calls `function` once for each object that rows share."""
    results: dict[int, tuple[Any, Result]] = {}

    def call(shared: Any) -> Result:
        if id(shared) not in results:
            if len(results) >= SHARED:
                results.clear()
            # The object is kept too: its id is unique only while it exists.
            results[id(shared)] = shared, function(shared)
        return results[id(shared)][1]

    return call
