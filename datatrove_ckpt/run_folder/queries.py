"""Makes rows by queries of DuckDB: the input of a step, or a step that is a query alone.

The same rows must come twice, or a resume would mix rows of two inputs. So a query has one thread
and a full order, and what reads clocks or dice is refused. The rows are files of Parquet in a
folder, which a rename commits: ``FOLDER.new``, sync, ``FOLDER``. The footer of each file says what
the rows were made from, so rows and record cannot come apart.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import xxhash
from loguru import logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.memory import free_memory
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.errors import ConfigError, StorageFailed

if TYPE_CHECKING:
    import duckdb

_CLOCKS_AND_DICE = (
    "random setseed uuid gen_random_uuid uuidv4 uuidv7 now today current_date current_time "
    "current_timestamp current_localtime current_localtimestamp get_current_time "
    "get_current_timestamp transaction_timestamp localtime localtimestamp nextval currval"
)
_WITHOUT_ORDER = "first last any_value arbitrary list array_agg string_agg group_concat listagg"
_WITHOUT_FILES = ("range", "generate_series", "unnest")
_TYPES = {"HUGEINT": "BIGINT", "UHUGEINT": "UBIGINT", "DECIMAL": "DOUBLE", "ENUM": "VARCHAR"}
"""Types that rows cannot have unchanged, and the types that replace them."""
_GROUP = 10_240  # rows of a row group, a multiple of DuckDB's own
_GROUPS = 10  # of a file: each file may be a task
_MADE_FROM = b"made_from"
_DIGEST = b"digest"


@dataclass(frozen=True)
class Query:
    """A SELECT.

    Attributes:
        label: names it in messages.
        tables: the names that it reads, without those that it defines.
        reads_files: whether it reads files, which may change.
        is_ordered: its rows have an order of their own.
        is_filter: each row is a row of its table, which it may also leave out.
    """

    label: str
    sql: str
    tables: tuple[str, ...] = ()
    reads_files: bool = False
    is_ordered: bool = True
    is_filter: bool = True


class KeptRows(NamedTuple):
    """The rows of a query on disk.

    Attributes:
        made_from: the query, and the digests of the steps that it read.
        digest: hash of the rows.
    """

    folder: Path
    made_from: JsonObject
    digest: str
    rows: int

    @property
    def select(self) -> str:
        """The rows, as a table of another query."""
        return reads(sorted(map(str, self.folder.glob("*.parquet"))))


def reads(paths: list[str]) -> str:
    listed = ", ".join(f"'{_escaped(path)}'" for path in paths)
    return (
        "select columns(lambda name: name <> 'file_path') "
        f"from read_parquet([{listed}], union_by_name = true)"
    )


def _escaped(path: str) -> str:
    quoted = path.replace("'", "''")
    return re.sub(r"[\[*?]", r"[\g<0>]", quoted)  # a path is no pattern


def parse(sql: str, label: str) -> Query:
    """Reads a query without its tables.

    Raises:
        ConfigError: it is no SELECT, or its rows may differ each time; or duckdb is missing.
    """
    sql = sql.strip().rstrip(";")
    with _connected(Query(label, sql)) as connection:
        ((text,),) = connection.execute("select json_serialize_sql(?)", [sql]).fetchall()
        sql_of_aggregates = (
            "select function_name from duckdb_functions() where function_type = 'aggregate'"
        )
        aggregates = {name for (name,) in connection.execute(sql_of_aggregates).fetchall()}
    parsed = orjson.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise ConfigError(
            f"{label}: {parsed.get('error_message', 'give one SELECT, not several.')}"
        )
    statement = parsed["statements"][0]["node"]
    nodes = [*_nodes(statement)]
    defined = {entry["key"] for node in nodes for entry in node.get("cte_map", {}).get("map", ())}
    named = [node["table_name"] for node in nodes if node.get("type") == "BASE_TABLE"]
    functions = [node for node in nodes if node.get("class") == "FUNCTION"]
    called = [node["function_name"] for node in functions]
    columns = [node["column_names"][0] for node in nodes if len(node.get("column_names", ())) == 1]
    without_brackets = [name for name in columns if name.startswith(("current_", "localtime"))]
    for name in [*called, *without_brackets]:
        if name.lower() in _CLOCKS_AND_DICE.split():
            raise ConfigError(
                f"{label}: {name} has another value at each start, and rows must be equal then. "
                "For a draw by seed: order by hash(id, 42) limit 1000."
            )
    if any(sample["seed"] == -1 for node in nodes if (sample := node.get("sample"))):
        raise ConfigError(f"{label}: a sample needs a seed: using sample ... repeatable (42).")
    loose = [
        node["function_name"]
        for node in functions
        if node["function_name"] in _WITHOUT_ORDER.split() and not node["order_bys"]["orders"]
    ]
    loose += ["distinct on" for node in nodes if node.get("distinct_on_targets")]
    for name in dict.fromkeys(loose):
        logger.warning(
            f"{label}: {name} takes rows as they come. Add an order that decides, such as "
            "list(answer order by id)."
        )
    tables = tuple(dict.fromkeys(name for name in named if name not in defined))
    modifiers = [modifier["type"] for modifier in statement["modifiers"]]
    is_file = any(re.search(r"[./]", table) for table in tables)
    sources = [node for node in nodes if node.get("type") == "TABLE_FUNCTION"]
    reads_files = is_file or any(
        source["function"]["function_name"] not in _WITHOUT_FILES for source in sources
    )
    is_filter = aggregates.isdisjoint(called) and not any(
        node.get("type") in ("JOIN", "SET_OPERATION_NODE", "LIMIT_MODIFIER", "DISTINCT_MODIFIER")
        or node.get("group_expressions")
        for node in nodes
    )
    return Query(label, sql, tables, reads_files, "ORDER_MODIFIER" in modifiers, is_filter)


def _nodes(value: object) -> Iterator[Any]:
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            yield from _nodes(part)


def columns_of(query: Query, tables: Mapping[str, str]) -> dict[str, str]:
    """Binds a query: returns the types of its columns by name.

    Args:
        tables: a SELECT for each table that is a step.

    Raises:
        ConfigError: a name or a type is wrong.
    """
    with _connected(query, tables) as connection:
        relation = connection.sql(query.sql)
        names = relation.columns
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{query.label}: two columns are named {name}. Name one: AS.")
        return dict(zip(names, map(str, relation.types), strict=True))


def printed(query: Query, tables: Mapping[str, str], rows: int) -> str:
    """Returns the first rows of a query as a table for people."""
    with _connected(query, tables) as connection:
        return str(connection.sql(f"select * from ({query.sql}\n) limit {rows}"))


def type_of_schema(schema: object) -> str:
    """Returns the type of a column of answers with a JSON schema."""
    if not isinstance(schema, dict):
        return "VARCHAR"
    kinds = schema.get("type")
    kind = kinds if isinstance(kinds, str) else next(iter(kinds or ()), "")
    properties = schema.get("properties")
    if properties:
        return struct({name: type_of_schema(part) for name, part in properties.items()})
    if kind == "array":
        return f"{type_of_schema(schema.get('items'))}[]"
    return {"integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}.get(kind, "VARCHAR")


def type_of_value(value: object) -> str:
    """Returns the type of a column with a value."""
    if isinstance(value, dict) and value:
        return struct({name: type_of_value(part) for name, part in value.items()})
    if isinstance(value, list):
        return f"{type_of_value(next(iter(value), None))}[]"
    return {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE"}.get(type(value), "VARCHAR")


def struct(types: Mapping[str, str]) -> str:
    return f"STRUCT({', '.join(f'{quoted(name)} {kind}' for name, kind in types.items())})"


def nulls(types: Mapping[str, str]) -> str:
    """Returns columns of these types without values, as part of a SELECT."""
    return ", ".join(f"cast(null as {kind}) as {quoted(name)}" for name, kind in types.items())


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def kept_rows(folder: Path) -> KeptRows | None:
    """Returns the rows that a folder keeps; None if it keeps none."""
    paths = sorted(folder.glob("*.parquet"))
    if not paths or _DIGEST not in (pq.read_metadata(paths[0]).metadata or {}):
        return None
    footers = [pq.read_metadata(path) for path in paths]
    digests = b"".join(footer.metadata[_DIGEST] for footer in footers)
    rows = sum(footer.num_rows for footer in footers)
    made_from = orjson.loads(footers[0].metadata[_MADE_FROM])
    return KeptRows(folder, made_from, xxhash.xxh3_128_hexdigest(digests), rows)


def is_damaged(kept: KeptRows) -> bool:
    """Whether a file of the rows cannot be read, or is not as it was written."""
    try:
        for path in kept.folder.glob("*.parquet"):
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for _ in file.iter_batches():
                    pass
    except (OSError, ValueError):  # pyarrow's own are ValueErrors
        return True
    return False


def make_rows(
    query: Query, tables: Mapping[str, str], folder: Path, made_from: JsonObject
) -> KeptRows:
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
    columns = columns_of(query, tables)
    replaced = []
    for name, kind in columns.items():
        other = _TYPES.get(kind.partition("(")[0])
        if other:
            replaced.append(f"cast({quoted(name)} as {other}) as {quoted(name)}")
    whole = f"select * from ({query.sql}\n)"
    if replaced:
        whole = f"select * replace ({', '.join(replaced)}) from ({query.sql}\n)"
    if not query.is_ordered:
        whole += " order by all"
    new = folder.with_name(f"{folder.name}.new")
    spill = folder.with_name(f"{folder.name}.spill")
    files.disk.remove_tree(new)
    files.disk.make_dirs(new)
    try:
        with _connected(query, tables, str(spill)) as connection:
            groups = connection.sql(whole).to_arrow_reader(_GROUP)
            _write(groups, new, orjson.dumps(made_from, option=orjson.OPT_SORT_KEYS))
        files.disk.sync_dir(new)
        files.disk.remove_tree(folder)
        files.disk.rename(new, folder)
        files.disk.sync_dir(folder.parent)
    finally:
        files.disk.remove_tree(spill)
        files.disk.remove_tree(new)
    kept = kept_rows(folder)
    assert kept is not None
    return kept


def _write(groups: Any, folder: Path, made_from: bytes) -> None:
    number = 0
    batches = [*islice(groups, _GROUPS)]
    while batches or not number:
        path = folder / f"rows_{number:05d}.parquet"
        digest = xxhash.xxh3_128()
        writer = pq.ParquetWriter(path, groups.schema, write_page_checksum=True)
        with explained("write", path), writer as file:
            for batch in batches:
                digest.update(batch.serialize())
                file.write_batch(batch)
            digest.update(groups.schema.serialize())
            file.add_key_value_metadata({_MADE_FROM: made_from, _DIGEST: digest.hexdigest()})
        files.disk.sync(path)
        number += 1
        batches = [*islice(groups, _GROUPS)]


@contextmanager
def _connected(
    query: Query, tables: Mapping[str, str] | None = None, spill: str = ""
) -> "Iterator[duckdb.DuckDBPyConnection]":
    """Yields a connection with the tables as views. Its errors become ConfigError."""
    tables = tables or {}
    label = query.label
    try:
        import duckdb
    except ImportError:
        raise ConfigError(
            f"{label}: queries need duckdb: pip install 'datatrove-ckpt[sql]'"
        ) from None
    limit = free_memory() // 2  # a server may stand beside it
    settings: dict[str, str | bool | int | float | list[str]] = {
        "threads": 1,
        "memory_limit": f"{limit}B",
        "temp_directory": spill,
        "autoinstall_known_extensions": False,  # no internet
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
    }
    try:
        with duckdb.connect(config=settings) as connection:
            for protocol in set(re.findall(r"\b([a-z][a-z0-9]*)://", query.sql)):
                import fsspec  # slow to import

                connection.register_filesystem(fsspec.filesystem(protocol))
            for name, select in tables.items():
                connection.execute(f"create view {quoted(name)} as {select}")
            yield connection
    except duckdb.OutOfMemoryException as error:
        raise StorageFailed(
            f"{label}: the query needs more than {byte_size(limit)}, half of the memory that is "
            "free here. Order a subquery in place of list(... order by ...), which holds all rows; "
            "or run it where more is free."
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        raise ConfigError(f"{label}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return redact(str(error).partition("\n\nLINE")[0].replace("\n", " "))
