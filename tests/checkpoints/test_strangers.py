"""Untrusted files: with any content, reading them succeeds or raises UserError, and runs no code."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from folio import UserError
from folio.base import settings
from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint, foreign, foreign_tokenizers
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import FORMATS
from folio.checkpoints.snapshots import read_snapshot, write_snapshot
from folio.data.shards import open_dataset
from folio.data.sources.music import EventFormat
from folio.data.tokenizer import EOT_TEXT, CharTokenizer
from folio.decoding.prompt_files import read_prompt
from folio.experiments.selection import read_runs
from tests.support.exports import checkpoint_of, output_path
from tests.support.foreign import save_nanogpt_checkpoint
from tests.support.processes import run_code
from tests.support.tiny_tokenizers import bpe
from train import TrainConfig, train

pytestmark = pytest.mark.architecture(
    "folio/checkpoints: foreign.py and export_formats.py, which know GPT-2's weights only"
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/hosts"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """Random bytes; truncated content; content with flipped bits or an overwritten length; or its JSON with a value
    replaced or removed.
    """
    mutation = draw(st.sampled_from(["bytes", "cut", "flip", "length", "json", "json", "json"]))
    if mutation == "bytes":
        return draw(st.binary(max_size=200))
    if mutation == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if mutation == "json":
        try:
            document = json.loads(content)
        except ValueError:
            mutation = draw(st.sampled_from(["flip", "length"]))
    if mutation == "length":
        number = draw(st.sampled_from([0, 1, 255, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]))
        position = draw(st.integers(0, len(content) - 1))
        return content[:position] + number.to_bytes(8, "little") + content[position + 8 :]
    if mutation == "flip":
        flipped = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            flipped[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    root = {"": document}
    parent: dict | list = root
    key: str | int = ""
    while draw(st.booleans()) and isinstance(parent[key], (dict, list)) and parent[key]:
        parent = parent[key]
        key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
    if parent is not root and draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = draw(VALUES)
    return json.dumps(root[""]).encode()


# The path of a valid file, and a function that reads it
Prepared = tuple[Path, Callable[[], object]]
# Prepares the tested file, given a checkpoint, a data set and an empty folder for the file
Case = Callable[[Path, Path, Path], Prepared]


@pytest.fixture(scope="module")
def run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a checkpoint."""
    out_dir = tmp_path_factory.mktemp("run") / "out"
    small = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, batch_size=2, max_iters=2, warmup_iters=0, eval_iters=1)
    train(TrainConfig(**small, dataset="verse", data_dir=str(data_dir), out_dir=str(out_dir), dtype="float32"))
    return checkpoint.load(out_dir).path


def use(loaded: Checkpoint) -> None:
    loaded.build()
    loaded.tokenizer.decode([0])


def in_checkpoint(name: str) -> Case:
    """A file of a checkpoint. The manifest is adapted to its content, as an attacker would do."""

    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        step = Path(shutil.copytree(run, folder / "step-000002"))
        manifest = read_json(step / "manifest.json")

        def read() -> None:
            if name != "manifest.json":
                described = {"bytes": (step / name).stat().st_size, "sha256": sha256(step / name)}
                write_json(step / "manifest.json", {**manifest, name: described})
            use(checkpoint.load(step))

        return step / name, read

    return prepare


def in_cloned_run(name: str) -> Case:
    """A file of a run's checkpoint, whose manifest describes the original, as after a clone without Git LFS."""

    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        step = Path(shutil.copytree(run, folder / "out" / run.name))
        return step / name, lambda: checkpoint.load(step.parent)

    return prepare


def in_data_set(name: str) -> Case:
    """A file of a data set of Folio."""

    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        copied = Path(shutil.copytree(data, folder / "data"))
        (copied / "val_mask.bin").write_bytes(bytes((copied / "val.bin").stat().st_size // 2))
        meta = read_json(copied / "meta.json")
        meta["splits"]["val"][0]["mask_sha256"] = sha256(copied / "val_mask.bin")
        write_json(copied / "meta.json", meta)
        return copied / name, lambda: open_dataset(copied).load_tokenizer()

    return prepare


def in_nanogpt_data_set(name: str) -> Case:
    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        save_nanogpt_checkpoint(folder / "out" / "ckpt.pt")
        copied = folder / "data" / "abc"
        return copied / name, lambda: open_dataset(copied).load_tokenizer().decode([0])

    return prepare


def shard_header(run: Path, data: Path, folder: Path) -> Prepared:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 10
    for split in ("train", "val"):
        (folder / f"x_{split}_0.bin").write_bytes(header.tobytes() + bytes(20))
    return folder / "x_train_0.bin", lambda: open_dataset(folder)


def foreign_file(to: str, name: str) -> Case:
    """A file of a model in the format of another program, read by `foreign.load`."""

    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        tokenizer = CharTokenizer("abc") if to == "nanogpt" else bpe()
        activation = "gelu" if to == "nanogpt" else "gelu_new"
        loaded = checkpoint_of(tokenizer, True, activation=activation, block_size=4, n_layer=1, n_head=1, n_embd=2)
        path = output_path(folder, to)
        FORMATS[to].write(loaded, path)
        if to == "hf":
            spelled = foreign_tokenizers.spell_tokens(tokenizer.ranks)
            pairs = [
                f"{spelled[left]} {spelled[right]}\n" for left, right in foreign_tokenizers.merge_pairs(tokenizer.ranks)
            ]
            if name != "tokenizer.json":
                (path / "merges.txt").write_text("#version: 0.2\n" + "".join(pairs), encoding="utf-8")
            write_json(path / "vocab.json", {token: i for i, token in enumerate([*spelled, EOT_TEXT])})
        weights = path / "model.safetensors"
        if name.startswith("pytorch_model.bin"):
            zipped = name == "pytorch_model.bin"
            torch.save(load_file(weights), path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
            weights.unlink()
        if name in ("model.safetensors.index.json", "part.safetensors"):
            weight_map = dict.fromkeys(load_file(weights), "part.safetensors")
            write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})
            weights.rename(path / "part.safetensors")
        init_from = path / "ckpt.pt" if to == "nanogpt" else path
        return path / name.removesuffix(" (old)"), lambda: use(foreign.load(str(init_from)))

    return prepare


HUGGING_FACE = "config.json merges.txt vocab.json tokenizer.json tokenizer_config.json model.safetensors".split()
HUGGING_FACE += ["model.safetensors.index.json", "part.safetensors", "pytorch_model.bin", "pytorch_model.bin (old)"]


def config_text(run: Path, data: Path, folder: Path) -> Prepared:
    lines = ["dataset = 'a'", "n_layer = 4", "n_head = 4", "n_embd = 64 * n_layer", "out_dir = 'out' + 'x'"]
    (folder / "config.py").write_text("\n".join([*lines, "dropout = -(-1) / 10**2\n"]))
    return folder / "config.py", lambda: settings.load(TrainConfig, [str(folder / "config.py")])


def snapshot(run: Path, data: Path, folder: Path) -> Prepared:
    path = folder / "snapshots" / "step-000002.safetensors"
    write_snapshot(folder, 2, {"a": torch.zeros(3)})
    return path, lambda: read_snapshot(path)


def prompt_file(suffix: str) -> Case:
    def prepare(run: Path, data: Path, folder: Path) -> Prepared:
        path = folder / f"prompt{suffix}"
        path.touch()
        return path, lambda: read_prompt("start", f"FILE:{path}", EventFormat().tokenizer())

    return prepare


FOREIGN = {
    "GGUF": foreign_file("gguf", ""),
    "nanoGPT's ckpt.pt": foreign_file("nanogpt", "ckpt.pt"),
    "nanoGPT's meta.pkl": foreign_file("nanogpt", "data/folio_char/meta.pkl"),
    **{f"Hugging Face's {name}": foreign_file("hf", name) for name in HUGGING_FACE},
}
CASES = {
    "config text": config_text,
    "meta.json": in_data_set("meta.json"),
    "shard header": shard_header,
    "meta.pkl": in_nanogpt_data_set("meta.pkl"),
    **FOREIGN,
    **{name: in_checkpoint(name) for name in ("state.json", "tokenizer.json", "manifest.json", "model.safetensors")},
}


@pytest.mark.needs("gguf", "transformers")
@pytest.mark.parametrize("examples", [20, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_an_untrusted_file_is_read_or_is_an_error(case, examples, run, data_dir, tmp_path, seed):
    """The long version has 40,000 cases: python -m pytest -m slow tests/checkpoints/test_strangers.py"""
    path, read = CASES[case](run, data_dir / "verse", tmp_path)
    read()

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None)
    @hypothesis.given(mutated(path.read_bytes()))
    def is_read_or_error(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read()
        except UserError as error:
            assert str(error)
            assert case not in FOREIGN or len(str(error).splitlines()) == 1

    is_read_or_error()


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * b"0" + b"\nsize 497774208\n"


MORE_FILES = {
    **{f"cloned {name}": in_cloned_run(name) for name in ("model.safetensors", "state.json", "tokenizer.json")},
    "cloned optimizer.safetensors": in_cloned_run("optimizer.safetensors"),
    "snapshot": snapshot,
    **{f"Folio's {name}": in_data_set(name) for name in ("train.bin", "val_mask.bin", "tokenizer.json")},
    **{f"nanoGPT's {name}": in_nanogpt_data_set(name) for name in ("train.bin", "val.bin")},
    "text prompt": prompt_file(".txt"),
    "MIDI prompt": prompt_file(".mid"),
}


@pytest.mark.needs("gguf", "transformers")
@pytest.mark.parametrize("case", [*CASES, *MORE_FILES])
def test_a_git_lfs_pointer_is_named(case, run, data_dir, tmp_path):
    """After a clone without Git LFS, the messages were about damage, code, or the number of tokens."""
    path, read = {**CASES, **MORE_FILES}[case](run, data_dir / "verse", tmp_path)
    path.write_bytes(LFS_POINTER)
    with pytest.raises(UserError, match=r"^\S+ is a Git LFS pointer, .*: run git lfs pull, or download the file$"):
        read()


@pytest.mark.needs("gguf", "transformers")
@pytest.mark.parametrize("case", FOREIGN)
def test_a_device_instead_of_a_foreign_file_is_an_error(case, run, data_dir, tmp_path):
    """Reading a vocab.json that links to /dev/zero never ended, and opening weights that are a FIFO blocked.

    For config.json and files given by name, the error was a missing checkpoint.
    """
    path, read = FOREIGN[case](run, data_dir / "verse", tmp_path)
    path.unlink()
    path.symlink_to(os.devnull)
    with pytest.raises(UserError, match=rf"{path.name} is not a regular file"):
        read()


def test_a_run_whose_json_files_are_git_lfs_pointers_is_listed(run, tmp_path, capsys):
    """tools/runs.py would leave it out."""
    out_dir = Path(shutil.copytree(run.parent, tmp_path / "out"))
    for name in ("last.json", "best.json"):
        (out_dir / name).write_bytes(LFS_POINTER)
    assert checkpoint.load(out_dir).path.name == run.name
    assert f"last.json names no checkpoint; according to the checkpoints, {run.name} is" in capsys.readouterr().err
    for path in out_dir.glob("step-*/*.json"):
        path.write_bytes(LFS_POINTER)
    (listed,) = read_runs([out_dir])
    assert listed.step == 2 and listed.state == {}


@pytest.mark.needs("gguf", "transformers")
@pytest.mark.parametrize("nested", ["[" * 100_000, "x = " + "-" * 100_000 + "1", "x = " + "(" * 300 + ")" * 300])
def test_deeply_nested_content_is_an_error(nested, run, data_dir, tmp_path):
    for case in CASES:
        (tmp_path / case).mkdir()
        path, read = CASES[case](run, data_dir / "verse", tmp_path / case)
        path.write_text(nested)
        with pytest.raises(UserError):
            read()


def test_paths_stay_in_their_folder(run, data_dir, tmp_path):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(20))
    path, read = in_data_set("meta.json")(run, data_dir / "verse", tmp_path)
    for name in ("../outside.bin", str(outside)):
        meta = read_json(path)
        meta["splits"]["train"][0] = {"file": name, "tokens": 10, "sha256": sha256(outside)}
        write_json(path, meta)
        with pytest.raises(UserError, match="outside its folder"):
            read()


GGUF_HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)  # version 3, no tensor, one field


def gguf_text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_field(kind: int, content: bytes, name: bytes = b"x") -> bytes:
    return gguf_text(name) + struct.pack("<I", kind) + content


def gguf_tensor(dimensions: list[int], kind: int = 0, offset: int = 0, copies: int = 1) -> bytes:
    """A file that declares one tensor `copies` times under different names, with 64 bytes of data."""
    content = struct.pack("<4sIQQ", b"GGUF", 3, copies, 0)
    for i in range(copies):
        content += gguf_text(b"t%d" % i)
        content += struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    return content + bytes(-len(content) % 32) + bytes(64)


@pytest.mark.needs("gguf")
def test_a_small_file_with_a_huge_array_ends(tmp_path):
    """The gguf package treated data past the end of the file as empty, and looped over 2**62 elements."""
    path = tmp_path / "x.gguf"
    path.write_bytes(GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 4, 2**62)))
    assert path.stat().st_size == 49
    program = "from folio import UserError\nfrom folio.checkpoints import foreign\n"
    result = run_code(f"{program}try: foreign.load({str(path)!r})\nexcept UserError as error: print(error)")
    assert "it ends at byte 49, in the middle of a value" in result.stdout, result.stderr


ENDS = "it ends at byte"
GGUF_WITH_WRONG_LENGTHS = {
    "string": (GGUF_HEADER + gguf_field(8, struct.pack("<Q", 2**64 - 1)), ENDS),
    "name": (GGUF_HEADER + struct.pack("<Q", 2**63), ENDS),
    "array of strings": (GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 8, 2**62)), ENDS),
    "array of bytes": (GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 0, 2**64 - 1)), ENDS),
    "nested arrays": (GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 9, 1) * 5000), "it has an array of arrays"),
    "type of array": (GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 99, 1)), "is not a valid GGUFValueType"),
    "strings in array": (
        GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 8, 2**22) + bytes(2**25)),
        "4,194,304 strings in an array, more than 2,097,152",
    ),
    "elements of a used field": (
        GGUF_HEADER + gguf_field(9, struct.pack("<IQ", 0, 2**22) + bytes(2**22), b"gpt2.block_count"),
        "4,194,304 elements in gpt2.block_count, more than 2,097,152",
    ),
    "number of fields": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**64 - 1), "fields, more than 16,384"),
    "number of tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 2**64 - 1, 0), "tensors, more than 16,384"),
    "alignment": (GGUF_HEADER + gguf_field(4, bytes(4), b"general.alignment"), "alignment: must be a non-zero power"),
    "duplicate field": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + 2 * gguf_field(4, bytes(4)), "Duplicate x already"),
    "byte order": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "its byte order is not this machine's"),
    "dimension": (gguf_tensor([2**62]), ENDS),
    "dimensions": (gguf_tensor([2**32, 2**32]), "cannot reshape"),  # their product is 0 in 64 bits
    "number of dimensions": (gguf_tensor([1])[:34] + struct.pack("<I", 2**32 - 1), ENDS),
    "offset": (gguf_tensor([16], offset=2**64 - 32), "overflow"),
    "size of all tensors": (gguf_tensor([16], copies=9), "its tensors are larger than the file"),
    "empty file": (b"", "cannot mmap an empty file"),
}


@pytest.mark.needs("gguf")
@pytest.mark.parametrize("case", GGUF_WITH_WRONG_LENGTHS)
def test_gguf_with_wrong_lengths_is_an_error(case, tmp_path):
    content, reason = GGUF_WITH_WRONG_LENGTHS[case]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.gguf is not a GGUF file of GPT-2: .*{reason}"):
        foreign.load(str(tmp_path / "x.gguf"))


@pytest.mark.needs("gguf")
def test_an_array_in_a_gguf_is_read_as_one_array(tmp_path):
    """The gguf package created an object for each element: 2 MB of bytes took 1.7 GB and 22 s."""
    strings = b"".join(map(gguf_text, [b"ab", b"", "é".encode()]))
    content = struct.pack("<4sIQQ", b"GGUF", 3, 0, 3)
    content += gguf_field(9, struct.pack("<IQ", 0, 2**21) + bytes(2**21), b"unused")
    content += gguf_field(9, struct.pack("<IQ", 8, 3) + strings, b"tokenizer.ggml.tokens")
    content += gguf_field(9, struct.pack("<IQ3i", 5, 3, 1, -2, 3), b"tokenizer.ggml.token_type")
    (tmp_path / "x.gguf").write_bytes(content + bytes(32))
    reader = foreign._open_gguf(tmp_path / "x.gguf")
    assert [len(reader.fields[name].parts) for name in ("unused", "tokenizer.ggml.tokens")] == [4, 4]
    assert reader.fields["unused"].parts[-1].shape == (2**21,)
    assert foreign._gguf_value(reader, "tokenizer.ggml.tokens") == ["ab", "", "é"]
    assert foreign._gguf_value(reader, "tokenizer.ggml.token_type") == [1, -2, 3]


@pytest.mark.needs("gguf")
def test_a_truncated_gguf_is_an_error(run, tmp_path):
    path, read = foreign_file("gguf", "")(run, run, tmp_path)
    content = path.read_bytes().rstrip(b"\0")  # the last tensor is followed by padding
    for size in [*range(0, len(content), 499), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(UserError):
            read()
