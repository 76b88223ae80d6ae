"""The checksum of a tensor's or an array's bytes."""

from __future__ import annotations

import json
import zlib

import numpy as np
import tensorflow as tf

from kdist.engines.tensors import flat


def checksum(tensor: tf.Tensor) -> int:
    """Returns the CRC-32 of an eager tensor's bytes, of one of strings, too."""
    if tensor.dtype == tf.string:
        return zlib.crc32(json.dumps(texts(tensor)).encode())
    return checksum_of_array(np.ascontiguousarray(flat.to_array(tensor)))


def checksum_of_array(array: np.ndarray, before: int = 0) -> int:
    """Returns the CRC-32 of a contiguous array's bytes, after those of another checksum."""
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, before)


def texts(tensor: tf.Tensor) -> list[str]:
    """Returns the elements of an eager tensor of strings, each with a character for a byte."""
    return [each.decode("latin-1") for each in np.array(tensor.numpy(), object).reshape(-1)]
