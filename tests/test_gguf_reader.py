"""GGUF files against the package gguf's own reader, and files that lie about their lengths."""

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from folio.gguf_reader import GGUFFile

ROOT = Path(__file__).resolve().parent.parent
HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)  # version 3, no tensor, one field


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(kind: int, content: bytes) -> bytes:
    return HEADER + text(b"x") + struct.pack("<I", kind) + content


def written(path: Path, alignment: int = 32) -> Path:
    """A file with a value of each type, arrays, and tensors in three dtypes."""
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_custom_alignment(alignment)
    for kind, value in (("uint8", 200), ("int8", -3), ("uint16", 60000), ("int16", -5), ("uint32", 2**32 - 1)):
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    for kind, value in (("int32", -7), ("float32", 0.1), ("bool", True), ("uint64", 2**60), ("int64", -(2**60))):
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_float64("a.float64", 0.1)
    writer.add_string("a.string", "é日")
    writer.add_array("a.strings", ["", "b", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -0.25])
    writer.add_tensor("wide", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.linspace(0, 1, 5, dtype=np.float16))
    rounded = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16).view(torch.uint8).numpy()
    writer.add_tensor("bf16", rounded, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_everything_is_as_the_package_gguf_reads_it(alignment, tmp_path):
    path = written(tmp_path / "x.gguf", alignment)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    expected = {name: f.contents() for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    plain = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in ours.fields.items()}
    assert plain == expected
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors[:2]:
        assert np.array_equal(ours.tensors[tensor.name].numpy(), tensor.data)
    assert torch.equal(ours.tensors["bf16"], torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16))


def test_a_small_file_with_a_huge_array_ends(tmp_path):
    """The package's reader took what is behind the end of the file for empty, and looped over 2**62 of it."""
    (tmp_path / "x.gguf").write_bytes(field(9, struct.pack("<IQ", 4, 2**62)))
    assert (tmp_path / "x.gguf").stat().st_size == 49
    program = "import sys; from folio import convert, UserError\n"
    program += "try: convert.load(sys.argv[1])\nexcept UserError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x.gguf"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "is not a GGUF file of GPT-2: it ends at byte 49, within a value of" in done.stdout, done.stderr


NESTED = struct.pack("<IQ", 9, 1) * 5000
HUGE = {
    "string": field(8, struct.pack("<Q", 2**64 - 1)),
    "key": HEADER + struct.pack("<Q", 2**63),
    "array of strings": field(9, struct.pack("<IQ", 8, 2**62)),
    "array of bytes": field(9, struct.pack("<IQ", 0, 2**64 - 1)),
    "nested arrays": field(9, NESTED),
    "fields": struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**64 - 1),
    "tensors": struct.pack("<4sIQQ", b"GGUF", 3, 2**64 - 1, 0),
    "unknown type": field(13, b"12345678"),
    "alignment 0": HEADER + text(b"general.alignment") + struct.pack("<II", 4, 0),
    "alignment text": HEADER + text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"),
    "field twice": struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + 2 * (text(b"x") + struct.pack("<II", 4, 1)),
    "version 1": struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
    "big-endian": struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
    "not GGUF": b"GGML" + bytes(60),
    "empty": b"",
}


@pytest.mark.parametrize("case", HUGE)
def test_lengths_are_checked_against_the_file(case, tmp_path):
    (tmp_path / "x.gguf").write_bytes(HUGE[case])
    with pytest.raises(ValueError, match=r"it|its|empty|general\.alignment"):
        GGUFFile(tmp_path / "x.gguf")


def tensor_file(path: Path, dimensions: list[int], kind: int = 0, offset: int = 0, copies: int = 1) -> Path:
    """One tensor's description, `copies` times under different names, and 64 bytes of data."""
    content = struct.pack("<4sIQQ", b"GGUF", 3, copies, 0)
    for i in range(copies):
        content += text(b"t%d" % i) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(64))
    return path


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(dimensions=[2**62]), "before the end of t0"),
        (dict(dimensions=[2**32, 2**32]), "before the end of t0"),  # their product is 0 in 64 bits
        (dict(dimensions=[4, 0]), "t0 is empty"),
        (dict(dimensions=[1] * 5), "t0 has 5 dimensions"),
        (dict(dimensions=[16], offset=2**64 - 32), "before the end of t0"),
        (dict(dimensions=[16], copies=5), "before the end of t"),  # the same 64 bytes again and again
        (dict(dimensions=[32], kind=2), r"t0 is quantized \(type 2\): convert it to F32, F16 or BF16"),
    ],
)
def test_tensors_are_within_the_file(options, reason, tmp_path):
    assert GGUFFile(tensor_file(tmp_path / "good.gguf", [16])).tensors["t0"].shape == (16,)
    with pytest.raises(ValueError, match=reason):
        GGUFFile(tensor_file(tmp_path / "x.gguf", **options))


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    content = written(tmp_path / "x.gguf").read_bytes()
    for size in range(len(content.rstrip(b"\0"))):  # the last tensor is followed by padding
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ValueError):
            GGUFFile(tmp_path / "cut.gguf")
