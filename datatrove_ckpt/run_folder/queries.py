"""Makes rows by queries of DuckDB: the input of a step, or a step that is a query alone.

The same rows must come twice, or a resume would mix rows of two inputs. So a query has one thread
and a full order, and what reads clocks or dice is refused. The rows are files of Parquet in a
folder, which a rename commits: ``FOLDER.new``, sync, ``FOLDER``. A file among them says what they
were made from, so rows and record cannot come apart.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import orjson
import xxhash
from fsspec.utils import get_protocol

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.memory import free_memory
from datatrove_ckpt.common.object_store import check_url
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.errors import ConfigError, StorageFailed

if TYPE_CHECKING:
    import duckdb

_CLOCKS_AND_DICE = (
    "random setseed uuid gen_random_uuid uuidv4 uuidv7 now today current_date current_time "
    "current_timestamp current_localtime current_localtimestamp get_current_time "
    "get_current_timestamp transaction_timestamp localtime localtimestamp nextval currval"
)
_WITHOUT_FILES = {"range", "generate_series", "unnest"}
_GROUP = 10_240  # rows of a row group, a multiple of DuckDB's own
_GROUPS = 10  # of a file: each file may be a task
_RECORD = ".made_from.json"
_COMBINES = re.compile("group.by|join|aggregate|limit|top.n|union|except|intersect", re.IGNORECASE)
"""Parts of a query's plan that do not take row by row."""

Tables = Mapping[str, object]
"""The tables of a query by name: SELECTs, or tables of Arrow."""


@dataclass(frozen=True)
class Query:
    """A SELECT.

    Attributes:
        tables: the names that it reads, without those that it defines.
        reads_files: whether it reads files, which may change.
        is_ordered: its rows have an order of their own.
    """

    label: str
    sql: str
    tables: tuple[str, ...] = ()
    reads_files: bool = False
    is_ordered: bool = True


@dataclass(frozen=True)
class KeptRows:
    """The rows of a query on disk.

    Attributes:
        made_from: the query, and the digests of the steps that it read.
    """

    folder: Path
    made_from: JsonObject
    digest: str
    rows: int

    @property
    def paths(self) -> list[str]:
        return sorted(map(str, self.folder.glob("*.parquet")))

    def record(self) -> None:
        fields = {"made_from": self.made_from, "digest": self.digest, "rows": self.rows}
        files.disk.replace(self.folder / _RECORD, orjson.dumps(fields))


def reads(paths: list[str]) -> str:
    listed = ", ".join(f"'{_escaped(path)}'" for path in paths)
    return (
        "select columns(lambda name: name <> 'file_path') "
        f"from read_parquet([{listed}], union_by_name = true)"
    )


def _escaped(path: str) -> str:
    quoted = path.replace("'", "''")
    return re.sub(r"[\[*?]", r"[\g<0>]", quoted)


def parse(sql: str, label: str) -> Query:
    """Reads a query without its tables.

    Raises:
        ConfigError: it is no SELECT, or its rows may differ each time; or duckdb is missing.
    """
    sql = sql.strip().rstrip(";")
    with _connected(Query(label, sql)) as connection:
        ((text,),) = connection.execute("select json_serialize_sql(?)", [sql]).fetchall()
    parsed = orjson.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise ConfigError(
            f"{label}: {parsed.get('error_message', 'give one SELECT, not several.')}"
        )
    statement = parsed["statements"][0]["node"]
    nodes = [*_nodes(statement)]
    defined = {entry["key"] for node in nodes for entry in node.get("cte_map", {}).get("map", ())}
    named = [node["table_name"] for node in nodes if node.get("type") == "BASE_TABLE"]
    called = [node["function_name"] for node in nodes if "function_name" in node]
    for node in nodes:
        columns = node.get("column_names", ())
        if len(columns) == 1:  # a name of a table before it makes it a column
            called += [name for name in columns if name.startswith(("current_", "localtime"))]
    for name in called:
        if name.lower() in _CLOCKS_AND_DICE.split():
            raise ConfigError(
                f"{label}: {name} has another value at each start, and rows must be equal then. "
                "For a draw by seed: order by hash(id, 42) limit 1000."
            )
    if any(node.get("seed") == -1 for node in nodes):
        raise ConfigError(f"{label}: a sample needs a seed: using sample ... repeatable (42).")
    tables = tuple(dict.fromkeys(name for name in named if name not in defined))
    sources = {
        node["function"]["function_name"] for node in nodes if node.get("type") == "TABLE_FUNCTION"
    }
    reads_files = any(re.search(r"[./]", table) for table in tables) or sources - _WITHOUT_FILES
    modifiers = [modifier["type"] for modifier in statement["modifiers"]]
    return Query(label, sql, tables, bool(reads_files), "ORDER_MODIFIER" in modifiers)


def _nodes(value: object) -> Iterator[JsonObject]:
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            yield from _nodes(part)


def columns_of(query: Query, tables: Tables) -> JsonObject:
    with _connected(query, tables) as connection:
        schema = connection.sql(query.sql).limit(0).to_arrow_table().schema
        return dict(zip(schema.names, schema.types, strict=True))


def takes_row_by_row(query: Query, tables: Tables) -> bool:
    """Whether a part of the rows gives the same part of the query's rows."""
    with _connected(query, tables) as connection:
        return len(tables) < 2 and not _COMBINES.search(connection.sql(query.sql).explain())


def printed(query: Query, tables: Tables, rows: int) -> str:
    with _connected(query, tables) as connection:
        return str(connection.sql(query.sql).limit(rows))


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def kept_rows(folder: Path) -> KeptRows | None:
    record = folder / _RECORD
    if not record.exists():
        return None
    kept = KeptRows(folder, **orjson.loads(record.read_bytes()))
    rows = sum(pq.read_metadata(path).num_rows for path in kept.paths)
    if rows != kept.rows or not kept.paths:
        return None
    return kept


def is_damaged(kept: KeptRows) -> bool:
    try:
        for path in kept.paths:
            for _ in pq.ParquetFile(path, page_checksum_verification=True).iter_batches():
                pass
    except (OSError, ValueError):
        return True
    return False


def make_rows(query: Query, tables: Tables, folder: Path, made_from: JsonObject) -> KeptRows:
    """Computes a query into a new folder, which takes the place of an old one.

    Raises:
        ConfigError: the query is wrong, or needs more memory.
        StorageFailed: the disk refuses the files.
    """
    others = [path.name for path in folder.glob("[!.]*") if not path.match("rows_*.parquet")]
    if others:
        raise ConfigError(
            f"{query.label}: {folder} holds other files, such as {others[0]}. Give the step "
            "another name, or move its folder away."
        )
    new = folder.with_name(f"{folder.name}.new")
    files.disk.remove_tree(new)
    files.disk.make_dirs(new)
    try:
        with _computed(query, tables, folder) as groups:
            digest, rows = _write(groups, new)
        KeptRows(new, made_from, digest, rows).record()
        files.disk.sync_dir(new)
        files.disk.remove_tree(folder)
        files.disk.rename(new, folder)
        files.disk.sync_dir(folder.parent)
    finally:
        files.disk.remove_tree(new)
    return KeptRows(folder, made_from, digest, rows)


def digest_now(query: Query, tables: Tables, folder: Path) -> str:
    """Returns the digest that the rows of a query in a folder would have now."""
    with _computed(query, tables, folder) as groups:
        digest = xxhash.xxh3_128(groups.schema.serialize())
        for batch in groups:
            digest.update(batch.serialize())
    return digest.hexdigest()


@contextmanager
def _computed(query: Query, tables: Tables, folder: Path) -> Iterator[Any]:
    whole = f"select * from ({query.sql}\n)"
    replaced = []
    for name, kind in columns_of(query, tables).items():
        other = ""
        if pa.types.is_decimal(kind):  # also a sum of integers
            other = "DOUBLE" if kind.scale else "BIGINT"
        if pa.types.is_dictionary(kind):  # an ENUM: the digest would not see its values
            other = "VARCHAR"
        if other:
            replaced.append(f"cast({quoted(name)} as {other}) as {quoted(name)}")
    if replaced:
        whole = f"select * replace ({', '.join(replaced)}) from ({query.sql}\n)"
    if not query.is_ordered:
        whole += " order by all"
    spill = folder.with_name(f"{folder.name}.spill")
    try:
        with _connected(query, tables, str(spill)) as connection:
            yield connection.sql(whole).to_arrow_reader(_GROUP)
    finally:
        files.disk.remove_tree(spill)


def _write(groups: Any, folder: Path) -> tuple[str, int]:
    digest = xxhash.xxh3_128(groups.schema.serialize())
    rows = 0
    for number in count():
        batches = [*islice(groups, _GROUPS)]
        if number and not batches:
            break
        path = folder / f"rows_{number:05d}.parquet"
        with (
            explained("write", path),
            pq.ParquetWriter(path, groups.schema, write_page_checksum=True) as file,
        ):
            for batch in batches:
                digest.update(batch.serialize())
                file.write_batch(batch)
                rows += batch.num_rows
        files.disk.sync(path)
    return digest.hexdigest(), rows


@contextmanager
def _connected(
    query: Query, tables: Tables | None = None, spill: str = ""
) -> "Iterator[duckdb.DuckDBPyConnection]":
    tables = tables or {}
    label = query.label
    try:
        import duckdb
    except ImportError:
        raise ConfigError(
            f"{label}: queries need duckdb: pip install 'datatrove-ckpt[sql]'"
        ) from None
    limit = free_memory() // 2  # a server may stand beside it
    urls = re.findall(r"\b[a-z][a-z0-9]*://[^']*", query.sql)
    for url in urls:
        check_url(label, url)
    try:
        with duckdb.connect(
            config={
                "threads": 1,
                "memory_limit": f"{limit}B",
                "temp_directory": spill,
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
                "python_enable_replacements": False,
            }
        ) as connection:
            for system in {fsspec.filesystem(get_protocol(url)) for url in urls}:
                connection.register_filesystem(system)
            for name, table in tables.items():
                if isinstance(table, str):
                    connection.sql(table).create_view(name)
                else:
                    connection.register(name, table)
            yield connection
    except duckdb.OutOfMemoryException as error:
        raise StorageFailed(
            f"{label}: the query needs more than {byte_size(limit)}, half of the memory that is "
            "free here. Order a subquery in place of list(... order by ...), which holds all rows; "
            "or run it where more is free."
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        text = str(error).partition("\n\nLINE")[0]
        if text.startswith("Traceback"):  # of fsspec
            cause = text.splitlines()[-1]
            text = (
                f"{' or '.join(urls)} cannot be read from here: {cause}. Without internet, save "
                "the file where you have it, and name the copy."
            )
        raise ConfigError(redact(f"{label}: {text}".replace("\n", " "))) from error
