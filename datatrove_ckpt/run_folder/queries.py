"""Makes rows by queries of DuckDB: the input of a step, or a step that is a query alone.

The same rows must come twice, or a resume would mix rows of two inputs. So a query has one thread
and a full order, and what reads clocks or dice is refused. The rows are files of Parquet in a
folder, which a rename commits: ``FOLDER.new``, sync, ``FOLDER``. A file among them says what they
were made from, so rows and record cannot come apart.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import orjson
import xxhash
from fsspec.utils import get_protocol

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.memory import free_memory
from datatrove_ckpt.common.object_store import check_url
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, ConfigError, StorageFailed

if TYPE_CHECKING:
    import duckdb

_CLOCKS_AND_DICE = (
    "random setseed uuid gen_random_uuid uuidv4 uuidv7 now today current_date current_time "
    "current_timestamp current_localtime current_localtimestamp get_current_time "
    "get_current_timestamp transaction_timestamp localtime localtimestamp nextval currval"
)
# A name of a table before it makes a column of current_date.
_CALLED = r'"function_name":"(\w+)"|"column_names":\["((?i:current_|localtime)\w*)"\]'
_READS_FILES = r"\w[./]|^(read|parquet|glob|sniff)|scan$"
"""Matches names of tables and functions that read files."""
_GROUP = 10_240  # rows of a row group, a multiple of DuckDB's own
_GROUPS = 10  # of a file: each file may be a task
_RECORD = ".made_from.json"
_COMBINES = re.compile("group.by|join|aggregate|limit|top.n|union|except|intersect", re.IGNORECASE)
"""Parts of a query's plan that do not take row by row."""

Tables = Mapping[str, object]
"""The tables of a query by name: Parquet files, or tables of Arrow."""


@dataclass(frozen=True)
class Query:
    """A SELECT whose rows have an order.

    Attributes:
        tables: the names that it reads, without those that it defines.
        reads_files: whether it reads files, which may change.
        left_out: a column that its rows do not have, even if it selects it.
    """

    label: str
    sql: str
    tables: Sequence[str] = ()
    reads_files: bool = False
    left_out: str = ""


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


def parse(sql: str, label: str) -> Query:
    """Reads a query without its tables.

    Raises:
        ConfigError: it is no SELECT, or its rows may differ each time; or duckdb is missing.
    """
    sql = sql.strip().rstrip(";")
    quoted = sql.replace("'", "''")
    with _rows(Query(label, f"select json_serialize_sql('{quoted}')"), {}) as found:
        ((text,),) = found.fetchall()
    parsed = orjson.loads(text)
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise ConfigError(
            f"{label}: {parsed.get('error_message', 'give one SELECT, not several.')}"
        )
    called = [(function or column).lower() for function, column in re.findall(_CALLED, text)]
    for name in called:
        if name in _CLOCKS_AND_DICE.split():
            raise ConfigError(
                f"{label}: {name} differs at each start. For a draw by seed: order by hash(id, "
                "42) limit 1000."
            )
    if '"seed":-1' in text:
        raise ConfigError(f"{label}: a sample needs a seed: using sample ... repeatable (42).")
    defined = re.findall(r'"key":"([^"]*)","value":{"aliases"', text)  # by WITH
    named = re.findall('"table_name":"([^"]*)"', text)
    tables = [name for name in dict.fromkeys(named) if name not in defined]
    modifiers = parsed["statements"][0]["node"]["modifiers"]
    sql = f"from ({sql}\n)"  # which also gives columns names of their own
    if all(modifier["type"] != "ORDER_MODIFIER" for modifier in modifiers):
        sql += " order by all"
    reads_files = any(re.search(_READS_FILES, name) for name in [*tables, *called])
    return Query(label, sql, tables, reads_files)


def columns_of(query: Query, tables: Tables) -> JsonObject:
    with _rows(query, tables) as found:
        schema = found.limit(0).to_arrow_table().schema
        return dict(zip(schema.names, schema.types, strict=True))


def takes_row_by_row(query: Query, tables: Tables) -> bool:
    """Whether a part of the rows gives the same part of the query's rows."""
    with _rows(query, tables) as found:
        return len(tables) < 2 and not _COMBINES.search(found.explain())


def printed(query: Query, tables: Tables, rows: int) -> str:
    with _rows(query, tables) as found:
        return str(found.limit(rows))


def kept_rows(folder: Path) -> KeptRows | None:
    """Returns the rows in a folder; None if there are none, or not all.

    Raises:
        StorageFailed: they are damaged.
    """
    record = folder / _RECORD
    if not record.exists():
        return None
    try:
        kept = KeptRows(folder, **orjson.loads(record.read_bytes()))
        rows = sum(pq.read_metadata(path).num_rows for path in kept.paths)
    except (TypeError, ValueError) as error:
        raise StorageFailed(f"{folder} is damaged. Remove it, and run again: {error}") from None
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process at a time compute queries of a folder."""
    files.disk.make_dirs(path.parent)
    lock = None
    while lock is None:
        try:
            lock = Lock(path)
        except CheckpointLocked as error:
            warn_once(f"Waiting for a query: {error}")
            time.sleep(0.2)
    try:
        yield
    finally:
        lock.release()


def keep(
    query: Query, tables: Tables, folder: Path, made_from: JsonObject, has_begun: bool = False
) -> KeptRows:
    """Computes a query into a folder, unless its rows are there.

    Args:
        has_begun: whether a run has read the rows that are there.

    Raises:
        CheckpointMismatch: the run has begun with other rows.
        ConfigError: the query is wrong, or needs more memory; or the folder holds other files.
        StorageFailed: the disk refuses the files.
    """
    kept = kept_rows(folder)
    if kept is not None and kept.made_from == made_from and not query.reads_files:
        return kept
    new = folder.with_name(f"{folder.name}.new")
    files.disk.remove_tree(new)
    files.disk.make_dirs(new)
    try:
        digest, rows = _write(query, tables, new)
        is_new = kept is None or kept.digest != digest
        if kept is not None and is_new and has_begun:
            reason = "the query, or a file that it reads, has changed"
            changed = made_from["steps"].items() - kept.made_from["steps"].items()
            if changed and kept.made_from["sql"] == query.sql:
                reason = f"the rows of step {min(changed)[0]} have changed"
            raise CheckpointMismatch(
                f"{query.label}: its rows differ from those in {folder}: {reason}."
            )
        record = orjson.dumps({"made_from": made_from, "digest": digest, "rows": rows})
        files.disk.replace((new if is_new else folder) / _RECORD, record)
        if is_new:
            _replace_folder(new, folder)
    finally:
        files.disk.remove_tree(new)
    return KeptRows(folder, made_from, digest, rows)


def _replace_folder(new: Path, folder: Path) -> None:
    others = [path.name for path in folder.glob("[!.]*") if not path.match("rows_*.parquet")]
    if others:
        raise ConfigError(
            f"{folder} holds other files, such as {others[0]}. Give the step another name, or move "
            "its folder away."
        )
    files.disk.sync_dir(new)
    files.disk.remove_tree(folder)
    files.disk.rename(new, folder)
    files.disk.sync_dir(folder.parent)


def _plain(field: Any) -> Any:
    if pa.types.is_decimal(field.type):  # also a sum of integers
        return field.with_type(pa.float64() if field.type.scale else pa.int64())
    if pa.types.is_dictionary(field.type):  # an ENUM: the digest would not see its values
        return field.with_type(pa.string())
    return field


def _write(query: Query, tables: Tables, folder: Path) -> tuple[str, int]:
    """Returns digest and number of the rows."""
    number = rows = 0
    with _rows(query, tables, f"{folder}/.spill") as found:
        groups = found.to_arrow_reader(_GROUP)
        groups = groups.cast(pa.schema(map(_plain, groups.schema)))
        digest = xxhash.xxh3_128(groups.schema.serialize())
        batches = [*islice(groups, _GROUPS)]
        while batches or not number:
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
            number += 1
            batches = [*islice(groups, _GROUPS)]
    return digest.hexdigest(), rows


def without(column: str) -> str:
    quoted = column.replace("'", "''")
    return f"columns(lambda name: name <> '{quoted}')"


@contextmanager
def _rows(query: Query, tables: Tables, spill: str = "") -> "Iterator[duckdb.DuckDBPyRelation]":
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
                if isinstance(table, list):
                    paths = [re.sub(r"[\[*?]", r"[\g<0>]", path) for path in table]
                    rows = connection.read_parquet(paths, union_by_name=True)
                    rows.select(without("file_path")).create_view(name)
                else:
                    connection.register(name, table)
            found = connection.sql(query.sql)
            if query.left_out in found.columns:
                found = found.select(without(query.left_out))
            yield found
    except duckdb.OutOfMemoryException as error:
        raise StorageFailed(
            f"{label}: the query needs more than {byte_size(limit)}, half of the free memory. "
            "Order a subquery in place of list(... order by ...), or run it where more is free."
        ) from error
    except (duckdb.Error, pa.ArrowException) as error:
        text = str(error).partition("\n\nLINE")[0]
        if text.startswith("Traceback"):  # of fsspec
            cause = text.splitlines()[-1]
            text = (
                f"{' or '.join(urls)} cannot be read from here: {cause}. Without internet, name "
                "a saved copy."
            )
        raise ConfigError(redact(f"{label}: {text}".replace("\n", " "))) from error
