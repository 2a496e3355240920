"""The cache of machine code. Most tests use "widen", which compiles fastest."""

import hashlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from folio.data.shards import open_dataset
from folio.data.word_cache import TEXT_STEP
from folio.decoding import decode_step
from folio.decoding.cpu_decoder import DECODE_STEP, CPUDecoder
from folio.machine import compiled
from tests.support.decoding import generate_tokens, random_model
from tests.support.processes import ROOT, run_code


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder; no function is loaded yet."""
    monkeypatch.setattr(compiled, "user_cache_path", lambda *args, **kwargs: tmp_path / "cache")
    forget()
    yield tmp_path / "cache" / "compiled"
    forget()


def forget() -> None:
    """Forget what this process knows about the cache, as in a new one."""
    for function in (compiled.cache_folder, compiled.address, compiled.announce):
        function.cache_clear()


def load() -> bool:
    """Load the function as a new process does. Returns whether it was compiled."""
    forget()
    with mock.patch.object(compiled, "compile_function", wraps=compiled.compile_function) as compile_function:
        assert compiled.address(DECODE_STEP, "widen", "float32")
    return compile_function.called


def test_a_process_that_reads_the_cache_does_not_import_numba():
    code = """
import sys
from tests.support.decoding import generate_tokens, random_model
from folio.decoding.cpu_decoder import CPUDecoder
print(len(generate_tokens(CPUDecoder(random_model(1), "float32"), [[1]])[0]), "numba" in sys.modules)
"""
    generate_tokens(CPUDecoder(random_model(1), "float32"), [[1]])  # fills the cache
    assert run_code(code).stdout == "20 False\n"


def test_machine_code_is_read_from_the_cache(cache):
    assert load() and not load() and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "no text", "a line", "symbol", "another symbol"])
def test_a_damaged_file_is_compiled_again(damage, cache):
    load()
    (path,) = cache.iterdir()
    content = path.read_bytes()
    changed = content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    damaged = {"truncated": content[:-1], "empty": b"", "changed": changed, "no text": b"\xff\n" * 9, "a line": b"x\n"}
    _, symbol, code = content.split(b"\n", 2)
    damaged["symbol"] = content.replace(symbol, b"x" + symbol[1:], 1)  # its address was 0, and each start crashed
    unknown = b"unknown\n" + code
    damaged["another symbol"] = hashlib.sha256(unknown).hexdigest().encode() + b"\n" + unknown
    path.write_bytes(damaged[damage])
    assert load() and not load()  # saved again


HIDE = """
import sys
from types import SimpleNamespace

def find_spec(name, *arguments):
    if name.partition(".")[0] == {package!r}:
        raise {error}

sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
"""


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_without_numba_torch_decodes_and_a_line_says_so(package, tmp_path):
    """The line said that functions were being compiled, and that model.py was changed."""
    error = 'SystemError("numba needs NumPy 2.3 or less\\nGot 2.9")'  # it is not always an ImportError
    code = """
from tests.support.decoding import random_model
from folio import UserError
from folio.decoding.decoders import make_decoder
from folio.machine.runtime import resolve_runtime
runtime = resolve_runtime("cpu", "float32", False)
for _ in range(2):
    print(type(make_decoder(random_model(1), runtime)).__name__)
try:
    make_decoder(random_model(1), runtime, "int4")
except UserError as error:
    print(error)
"""
    result = run_code(HIDE.format(package=package, error=error) + code, XDG_CACHE_HOME=str(tmp_path))
    reason = f"{package} cannot be imported (numba needs NumPy 2.3 or less): pip install -r requirements.txt"
    *decoders, message = result.stdout.splitlines()
    assert decoders == ["TorchDecoder"] * 2 and result.stderr.endswith(f"{reason}\n") and result.stderr.count("\n") == 1
    assert message.startswith("dtype=int4: ") and message.endswith(f"{reason}; use --dtype=auto")


def test_without_numba_a_text_is_prepared_and_near_duplicates_are_an_error(tmp_path):
    """Both commands ended in a traceback."""
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(f"some words of {name} that are not like any others\n" * 30)
    code = f"""
from folio import UserError
from prepare.text import TextConfig, main
settings = dict(inputs=({str(tmp_path)!r},), data_dir={str(tmp_path / "data")!r}, name="x", overwrite=True)
main(TextConfig(**settings))
for option in (dict(dedup="near"), dict(check_leakage=True)):
    try:
        main(TextConfig(**settings, **option))
    except UserError as error:
        print(error)
"""
    hide = HIDE.format(package="numba", error='ImportError("missing")')
    result = run_code(hide + code, XDG_CACHE_HOME=str(tmp_path / "c"))
    reason = "numba cannot be imported (missing): pip install -r requirements.txt"
    assert f", because {reason}" in result.stdout
    assert result.stdout.splitlines()[-2:] == [reason, reason] and not result.stderr
    assert open_dataset(tmp_path / "data" / "x")


def test_an_unwritable_cache_is_not_an_error(cache, capfd):
    """A file at the path of the folder makes it unwritable even for root."""
    cache.parent.write_text("a file")
    assert load() and load() and cache.parent.read_text() == "a file"
    assert "at every start" in (line := capfd.readouterr().err) and str(cache.parent) in line


PORTABLE = ["float32", "bfloat16", "int8", "int4"]
OTHER = 12345  # a user id


def give_away(path: Path) -> None:
    """Give a file, folder or link to another user."""
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def move_and_link(path: Path) -> None:
    """Replace a file or folder by a link to it."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda path: give_away(path.parent), r"compiled belongs to another user"),
        (lambda path: path.parent.chmod(0o777), r"other users can write to .*compiled"),
        (lambda path: path.parent.chmod(0o1777), r"other users can write to .*compiled"),
        (lambda path: path.parent.chmod(0o720), r"other users can write to .*compiled"),
        (lambda path: give_away(path.parent.parent), r"cache belongs to another user"),
        (lambda path: path.parent.parent.chmod(0o777), r"other users can write to .*cache"),
        (lambda path: (move_and_link(path.parent), give_away(path.parent)), r"compiled belongs to another user"),
        (give_away, None),
        (lambda path: path.chmod(0o606), None),
        (lambda path: path.chmod(0o660), None),
        (move_and_link, None),
    ],
)
def test_machine_code_that_another_user_may_have_written_is_not_executed(change, reason, cache, capfd):
    """In a cache below /tmp or another shared folder, other users could leave code for this one to run."""
    load()
    (path,) = cache.iterdir()
    content = path.read_bytes()
    change(path)
    capfd.readouterr()
    assert load()
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    if reason:  # compiled at every start, and not saved
        assert re.search(f"takes a few seconds at every start, because .*{reason}", line) and load()
        assert path.read_bytes() == content
    else:  # replaced by a file of this user
        assert "happens only once" in line and not load()
        assert path.stat().st_mode & 0o777 == 0o600 and path.lstat().st_uid == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
def test_a_cache_in_a_sticky_folder_or_of_root_is_used(cache, monkeypatch):
    """As in /tmp, where others can write, but not to what belongs to this user."""
    load()
    cache.parent.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert not load()


def test_without_a_home_functions_are_compiled_and_the_line_says_so(cache, monkeypatch, capfd):
    """Without HOME, and with a user id that has no name, commands ended in a traceback, or called a file changed."""
    fail = mock.Mock(side_effect=RuntimeError("could not determine the home directory"))
    monkeypatch.setattr(compiled, "user_cache_path", fail)
    monkeypatch.setattr(Path, "home", fail)
    assert load()
    assert "at every start, because the home folder of this user is unknown; set HOME" in capfd.readouterr().err


def test_the_cache_key_depends_on_the_sources_and_on_the_cpu(monkeypatch):
    key = compiled.cache_key.__wrapped__
    keys = [key(DECODE_STEP), key(DECODE_STEP), key(DECODE_STEP._replace(imports=()))]
    monkeypatch.setattr(compiled, "cpu_features", lambda: {"avx2": True})
    assert len({*keys, key(DECODE_STEP)}) == 3 and keys[0] == keys[1]


@pytest.mark.parametrize("module", [DECODE_STEP, TEXT_STEP], ids=lambda module: module.name)
def test_the_cache_key_includes_every_imported_module(module):
    """Indirect imports are not compiled, except those of simd."""
    lines = re.findall(
        r"^from (folio\.\w+(?:\.\w+)?) import (.*)", Path(find_spec(module.name).origin).read_text(), re.M
    )
    imported = {f"{parent}.{names}" if parent == "folio.machine" else parent for parent, names in lines}
    assert imported and imported <= set(module.imports)


def test_every_function_is_saved():
    """A function that calls an address valid only in this process would not be cached."""
    formats = {"linear": PORTABLE, "widen": PORTABLE, "mix": PORTABLE[:2]}
    for name in ("step", "help", "run_part", *formats):
        for format in formats.get(name, [None]):
            compiled.address(DECODE_STEP, name, format)
            assert compiled.cache_file(DECODE_STEP, name, format).exists(), (name, format)
        assert hasattr(decode_step, name)


def test_several_processes_compile_at_once(tmp_path):
    """Each gets the function, whichever saves it."""
    code = """
from folio.machine import compiled
from folio.data.word_cache import TEXT_STEP
print(compiled.address(TEXT_STEP, "add_to_filter", None) > 0)
"""
    settings = dict(os.environ, XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=settings, stdout=subprocess.PIPE) for _ in range(2)
    ]
    assert [process.communicate()[0] for process in processes] == [b"True\n"] * 2
    assert all(path.suffix == ".o" for path in tmp_path.rglob("*") if path.is_file())
