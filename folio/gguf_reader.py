"""Reading llama.cpp's GGUF: the metadata and the tensors of one file, every length checked against the file's size.

The format is specified in docs/gguf.md of github.com/ggml-org/ggml. The package gguf has a reader, too, but version
0.19 loops forever on an array that claims to be longer than the file, and needs two seconds and 90 bytes of memory per
byte of metadata for GPT-2's vocabulary.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAGIC = b"GGUF"
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # the types of ggml that are not quantized


class GGUFFile:
    """An open file: `fields` is its metadata by key, `tensors` their data by name, each as (out, in).

    An array of numbers is a numpy array, an array of strings a list. Raises ValueError for a file that is damaged or
    that holds what Folio does not read: quantized tensors, nested arrays, big-endian numbers.
    """

    def __init__(self, path: Path):
        self.content = np.memmap(path, mode="r")
        self.offset = 0
        if self._take(4).tobytes() != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            big_endian = version & 0xFFFF == 0
            raise ValueError("its numbers are big-endian" if big_endian else f"its version is {version}, not 2 or 3")
        n_tensors, n_fields = self._number("<u8"), self._number("<u8")
        self.fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"it has {key} twice")
            self.fields[key] = self._value(self._number("<u4"))
        places = [self._tensor_info() for _ in range(n_tensors)]
        self.tensors: dict[str, Tensor] = self._read_tensors(places)

    def _take(self, size: int) -> np.ndarray:
        """The next `size` bytes."""
        if size > len(self.content) - self.offset:
            raise ValueError(f"it ends at byte {len(self.content):,}, within a value of {size:,} bytes")
        self.offset += size
        return self.content[self.offset - size : self.offset]

    def _numbers(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize).tobytes(), dtype)

    def _number(self, dtype: str) -> Any:
        return self._numbers(dtype, 1)[0].item()

    def _string(self) -> str:
        return self._take(self._number("<u8")).tobytes().decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        if kind in NUMBERS:
            return self._numbers(NUMBERS[kind], count)
        raise ValueError(f"its metadata has an array of the type {kind}, which is neither a number nor a string")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor. GGUF counts dimensions from the innermost one."""
        name, dimensions = self._string(), self._number("<u4")
        if dimensions > 4:
            raise ValueError(f"{name} has {dimensions:,} dimensions")
        shape = tuple(self._numbers("<u8", dimensions).tolist()[::-1])
        return name, shape, self._number("<u4"), self._number("<u8")

    def _read_tensors(self, places: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, Tensor]:
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.offset // alignment) * alignment
        tensors, total = {}, 0
        for name, shape, kind, offset in places:
            if kind not in DTYPES:
                raise ValueError(f"{name} is quantized (type {kind}): convert it to F32, F16 or BF16")
            if name in tensors:
                raise ValueError(f"it has {name} twice")
            size = math.prod(shape) * DTYPES[kind].itemsize
            total += size
            if not size:
                raise ValueError(f"{name} is empty: its shape is {shape}")
            if start + offset + size > len(self.content) or total > len(self.content):
                raise ValueError(f"it ends at byte {len(self.content):,}, before the end of {name}")
            data = self.content[start + offset : start + offset + size].copy()
            tensors[name] = torch.from_numpy(np.asarray(data)).view(DTYPES[kind]).reshape(shape)
        return tensors
