"""Arrays in one file, written and read block by block: the format is NumPy's `.npz`."""

from __future__ import annotations

import contextlib
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdist.state.part import DeferredArray, rows_of_block

_LENGTHS = struct.Struct("<HH")  # of the name and the extra field, in the header of an entry of a ZIP file


def write_arrays(file: BinaryIO, arrays: Mapping[str, Any], receivers: Sequence[int]) -> None:
    """Writes arrays without a copy of them.

    Collective, if ranks have parts of some arrays: every rank must write or `send` them, in the same order.

    Args:
        file: open binary file.
        arrays: mapping of names to NumPy arrays and `DeferredArray`.
        receivers: sequence of ints, the ranks that write, this one among them.

    Raises:
        OSError: if they cannot be written; all blocks have been made then.
    """
    with (
        made_to_the_end(arrays, receivers) as blocks,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                descr = np.lib.format.dtype_to_descr(array.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(entry, header)
                for block in blocks.get(name, [array]):
                    entry.write(bytes_of(block))


def open_arrays(path: Path) -> dict[str, Any]:
    """Returns the arrays of a file by name, as `DeferredArray`: they are read when they are needed."""
    arrays: dict[str, Any] = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            with archive.open(info) as entry:
                version = np.lib.format.read_magic(entry)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, is_fortran, dtype = read(entry)
                header = entry.tell()
            name = info.filename.removesuffix(".npy")
            if is_fortran:  # as earlier versions wrote them
                arrays[name] = np.load(path, allow_pickle=False)[name]
                continue
            file.seek(info.header_offset + 26)
            place = info.header_offset + 30 + sum(_LENGTHS.unpack(file.read(_LENGTHS.size))) + header
            arrays[name] = array_at(path, place, shape, dtype)
    return arrays


def array_at(path: Path, place: int, shape: Sequence[int], dtype: np.dtype[Any]) -> DeferredArray:
    """Returns an array at some place in a file, which is read when it is needed."""

    def blocks(_: object) -> Iterator[Any]:
        rows, width = rows_of_block(shape, dtype), math.prod(shape[1:]) * dtype.itemsize
        number = shape[0] if shape else 1
        with open(path, "rb") as file:
            file.seek(place)
            for start in range(0, number, rows):
                count = min(rows, number - start)
                yield np.frombuffer(file.read(count * width), dtype).reshape(count, *shape[1:])

    return DeferredArray(shape, dtype, blocks)


def send(arrays: Mapping[str, Any], receivers: Sequence[int]) -> None:
    """Sends this rank's parts of arrays to the ranks that write them.

    Collective: every rank must send or write them, in the same order.

    Args:
        arrays: mapping of names to arrays; what is no `DeferredArray` is left out.
        receivers: sequence of ints, the ranks that write.
    """
    with made_to_the_end(arrays, receivers):
        pass


@contextlib.contextmanager
def made_to_the_end(arrays: Mapping[str, Any], receivers: Sequence[int]) -> Iterator[dict[str, Iterator[Any]]]:
    """Yields the blocks of arrays by name; makes all of them, after an error too: other ranks make their parts of them.

    Args:
        arrays: mapping of names to arrays; what is no `DeferredArray` is left out.
        receivers: sequence of ints, the ranks that get the blocks.
    """
    blocks = {name: each.blocks(receivers) for name, each in arrays.items() if isinstance(each, DeferredArray)}
    try:
        yield blocks
    finally:
        for each in blocks.values():
            for _ in each:
                pass


def bytes_of(array: Any) -> memoryview:
    """Returns an array's memory; that of a copy, if it is not contiguous."""
    view: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return view
