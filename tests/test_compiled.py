"""The cache of machine code. "widen" is the function that is compiled fastest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from folio import compiled, decode_step

FUNCTIONS = [(name, None) for name in ("step", "help", "run_part")] + [
    (name, format) for name in ("linear", "widen") for format in ("float32", "bfloat16", "int8", "int4")
]
FUNCTIONS += [("mix", "float32"), ("mix", "bfloat16")]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty folder for the machine code; nothing is loaded yet."""
    monkeypatch.setattr(compiled, "user_cache_path", lambda *names, **settings: tmp_path / "cache")
    compiled.address.cache_clear()
    yield tmp_path / "cache"
    compiled.address.cache_clear()


def count_compiled(monkeypatch) -> list[str]:
    """The functions that are compiled from now on."""
    names, compile_function = [], compiled.compile_function

    def compile_and_count(name, *arguments):
        names.append(name)
        return compile_function(name, *arguments)

    monkeypatch.setattr(compiled, "compile_function", compile_and_count)
    return names


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True)


def test_a_process_that_reads_the_cache_does_not_import_numba():
    code = """
import sys
from decoding import generate_tokens, random_model
from folio.cpu_decoder import CPUDecoder
print(len(generate_tokens(CPUDecoder(random_model(1), "float32"), [[1]])[0]), "numba" in sys.modules)
"""
    run(code)  # fills the cache
    assert run(code).stdout == "20 False\n"


def test_machine_code_is_read_from_the_cache(cache, monkeypatch):
    names = count_compiled(monkeypatch)
    for _ in range(2):
        assert compiled.address("widen", "int8")
        compiled.address.cache_clear()
    assert names == ["widen"] and len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "no text", "a line"])
def test_a_damaged_file_is_compiled_again(damage, cache, monkeypatch):
    compiled.address("widen", "float32")
    (path,) = cache.iterdir()
    content = path.read_bytes()
    changed = content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    damaged = {"truncated": content[:-1], "empty": b"", "changed": changed, "no text": b"\xff\n" * 9, "a line": b"x\n"}
    path.write_bytes(damaged[damage])
    compiled.address.cache_clear()
    names = count_compiled(monkeypatch)
    assert compiled.address("widen", "float32") and names == ["widen"]
    compiled.address.cache_clear()
    assert compiled.address("widen", "float32") and names == ["widen"]  # it was saved again


def test_a_folder_that_cannot_be_written_is_no_error(cache, monkeypatch):
    cache.write_text("a file")
    names = count_compiled(monkeypatch)
    assert compiled.address("widen", "float32") and names == ["widen"] and cache.read_text() == "a file"


def test_the_code_depends_on_the_sources_and_on_the_cpu(cache, monkeypatch):
    first = compiled.cache_key.__wrapped__("decode_step")
    assert first == compiled.cache_key.__wrapped__("decode_step")
    monkeypatch.setattr(compiled, "cpu_features", lambda: {"avx2": True})
    second = compiled.cache_key.__wrapped__("decode_step")
    monkeypatch.setitem(compiled.SOURCES, "decode_step", ("simd.py",))
    assert len({first, second, compiled.cache_key.__wrapped__("decode_step")}) == 3


def test_the_sources_of_a_module_include_what_it_imports():
    """What the imported modules import is not compiled, but for that of simd."""
    folder = Path(compiled.__file__).parent
    for module, sources in compiled.SOURCES.items():
        imported = re.findall(r"^from folio\.(\w+) import", (folder / f"{module}.py").read_text(), re.MULTILINE)
        assert {f"{module}.py", *(f"{name}.py" for name in imported)} <= set(sources)


@pytest.mark.parametrize("name, format", FUNCTIONS)
def test_every_function_is_saved(name, format):
    """It calls nothing that another process could not find at its address: a function that does is never cached."""
    compiled.address(name, format)
    assert compiled.cache_file(name, format, "decode_step").exists()
    assert hasattr(decode_step, name)


def test_several_processes_start_at_once(tmp_path):
    """Each has a function, whoever saved it."""
    code = "from folio import compiled; print(compiled.address('widen', 'float32') > 0)"
    settings = dict(os.environ, XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=settings, stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert [process.communicate()[0] for process in processes] == [b"True\n"] * 3
    assert all(path.suffix == ".o" for path in tmp_path.rglob("*") if path.is_file())
