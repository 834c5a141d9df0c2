"""Tables of whole numbers and names as Parquet files that say what they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kvcore.errors import InvalidArgument

METADATA_KEY = b"kvtwin"
NARROW = frozenset({"request", "instance", "num_running"})
"""Columns of 32 bits; the others have 64."""


@dataclass(frozen=True, slots=True)
class Named:
    """A column of names: `names[codes[i]]` stands in row i."""

    names: tuple[str, ...]
    codes: npt.NDArray[np.int64]


Table = dict[str, "npt.NDArray[np.int64] | Named"]


def write(path: Path, name: str, version: int, table: Table) -> None:
    """Write the table under its name and the version of its columns; raises OSError."""
    arrays = {column: _array(column, values) for column, values in table.items()}
    about = json.dumps({"table": name, "version": version}).encode()
    pq.write_table(pa.table(arrays, metadata={METADATA_KEY: about}), path, compression="zstd")


def read(path: Path, name: str, version: int) -> Table:
    """The table that `write` wrote; raises InvalidArgument for anything else."""
    try:
        found = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgument("file", str(path), f"a Parquet file that can be read ({reason})") from None
    about = json.loads((found.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    if about != {"table": name, "version": version}:
        raise InvalidArgument("file", str(path), f"table {name} of version {version}, not {about or 'another file'}")
    return {column: _values(found.column(column)) for column in found.column_names}


def numbers(table: Mapping[str, npt.NDArray[np.int64] | Named], column: str) -> npt.NDArray[np.int64]:
    """A column of numbers."""
    values = table[column]
    assert not isinstance(values, Named), column
    return values


def names(table: Mapping[str, npt.NDArray[np.int64] | Named], column: str) -> Named:
    """A column of names."""
    values = table[column]
    assert isinstance(values, Named), column
    return values


def _array(column: str, values: npt.NDArray[np.int64] | Named) -> pa.Array:
    if isinstance(values, Named):
        return pa.DictionaryArray.from_arrays(pa.array(values.codes, pa.int16()), pa.array(values.names, pa.string()))
    return pa.array(values, pa.int32() if column in NARROW else pa.int64())


def _values(column: pa.ChunkedArray) -> npt.NDArray[np.int64] | Named:
    whole = column.combine_chunks()
    if not pa.types.is_dictionary(whole.type):
        return np.asarray(whole.to_numpy(), dtype=np.int64)
    codes = whole.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Named(tuple(whole.dictionary.to_pylist()), codes)
