"""Functions compiled by numba, for decoding and for preparing texts. The machine code is cached on disk.

Loading the cache needs neither numba nor a compiler, and takes milliseconds instead of seconds. Machine code is loaded
only if no other user can have written it.
"""

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from platformdirs import user_cache_path

from folio import UserError
from folio.base.files import read_own_bytes, why_untrusted
from folio.base.progress import note

LANES = 16  # floats per vector; LLVM splits it over the CPU's registers
GROUP = 32  # int4 weights that share a scale
# Called only to raise errors or to allocate, which our functions never do.
NEVER_CALLED = {
    *("NRT_Free", "NRT_MemInfo_call_dtor", "NRT_decref", "NRT_incref", "numba_do_raise", "numba_gil_ensure"),
    *("numba_gil_release", "numba_runtime_build_excinfo_struct", "numba_unpickle"),
}


class CompiledModule(NamedTuple):
    """A module with functions that numba compiles."""

    name: str  # full, such as "folio.decoding.decode_step"
    imports: tuple[str, ...]  # other modules that its machine code depends on


class CompileError(UserError):
    """numba or llvmlite cannot be imported."""


@cache
def llvm() -> ModuleType:
    """llvmlite's binding. Raises CompileError."""
    return import_package("llvmlite.binding")


def import_package(name: str) -> ModuleType:
    """Import a module of numba or llvmlite. Raises CompileError."""
    package = name.partition(".")[0]
    with as_compile_error(package):
        return import_module(name)


@contextmanager
def as_compile_error(package: str) -> Iterator[None]:
    """Convert any exception to CompileError. For unsupported versions, numba raises several types."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CompileError(f"{package} cannot be imported ({reason}): pip install -r requirements.txt") from None


def cpu_features() -> dict[str, bool]:
    """The CPU's features under LLVM's names."""
    return dict(llvm().get_host_cpu_features())


def why_unavailable(module: CompiledModule, function: str) -> str | None:
    """Why a function without a format cannot be compiled on this machine; None if it can."""
    try:
        address(module, function)
        return None
    except CompileError as error:
        return str(error)


@cache
def address(module: CompiledModule, function: str, format: str | None = None) -> int:
    """The address of a compiled function. format: of the weights, for functions that depend on it.

    Arguments and result are int64. Raises CompileError.
    """
    path = cache_file(module, function, format)
    try:
        digest, content = read_file(path).split(b"\n", 1)
        if hashlib.sha256(content).hexdigest() == digest.decode():
            symbol, code = content.split(b"\n", 1)
            if loaded := load_object(code, symbol.decode()):
                return loaded
    except (OSError, ValueError):
        pass
    return compile_function(module, function, format, path)


@cache
def cache_folder() -> Path | None:
    """The folder of machine code in the user's cache; None if the user's home is unknown."""
    try:
        return user_cache_path("folio", appauthor=False) / "compiled"
    except RuntimeError:  # HOME is not set, and the user id has no name
        return None


def cache_file(module: CompiledModule, function: str, format: str | None) -> Path | None:
    """The path of a function's machine code in the user's cache; None without a cache."""
    key = hashlib.sha256(f"{function} {format} {cache_key(module)}".encode()).hexdigest()[:32]
    folder = cache_folder()
    return folder and folder / f"{key}.o"


def read_file(path: Path | None) -> bytes:
    """The content of a cache file. Raises OSError, also if another user may have written it."""
    if path is None or why_untrusted(path.parent):
        raise PermissionError
    return read_own_bytes(path)


def write_file(path: Path, content: bytes) -> None:
    """Write a cache file atomically, because several processes may write it. Ignores a read-only folder."""
    with suppress(OSError):
        partial = path.with_suffix(f".{os.getpid()}")
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)
        partial.replace(path)


@cache
def cache_key(module: CompiledModule) -> str:
    """A hash of everything that a module's machine code depends on."""
    digest = hashlib.sha256()
    for name in (module.name, *module.imports, __name__):
        digest.update(Path(find_spec(name).origin).read_bytes())
    with as_compile_error("numba"):
        versions = version("numba"), version("llvmlite")
    parts = (*versions, platform.python_version(), platform.platform())
    digest.update(repr((parts, llvm().get_host_cpu_name(), sorted(cpu_features().items()))).encode())
    return digest.hexdigest()[:16]


@cache
def engine() -> Any:
    """The LLVM ExecutionEngine that holds the machine code."""
    binding = llvm()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    unreachable = ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value
    for name in NEVER_CALLED:
        if not binding.address_of_symbol(name):
            binding.add_symbol(name, unreachable)
    target, features = binding.Target.from_default_triple(), binding.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def load_object(code: bytes, symbol: str) -> int:
    """Load machine code and return the address of a function in it; 0 if it has no such function."""
    engine().add_object_file(llvm().ObjectFileRef.from_data(code))
    engine().finalize_object()
    return engine().get_function_address(symbol)


_compiled: list = []  # references, without which numba frees the code


def compile_function(module: CompiledModule, function: str, format: str | None, path: Path | None) -> int:
    """Compile with numba, and save the machine code if there is a cache. Raises CompileError.

    path: of the cache file, or None.
    """
    numba = import_package("numba")
    is_saved = announce(path and path.parent)
    dispatcher = getattr(import_module(module.name), function)
    if format is not None:
        dispatcher = dispatcher(format)
    source = dispatcher.py_func
    native = numba.cfunc(numba.int64(*[numba.int64] * source.__code__.co_argcount))(source)
    _compiled.append(native)
    if is_saved and external_functions(native._library._final_module) <= NEVER_CALLED:
        code = native._library._get_compiled_object()
        content = f"{native._wrapper_name}\n".encode() + code
        write_file(path, f"{hashlib.sha256(content).hexdigest()}\n".encode() + content)
    return native.address


def external_functions(module: Any) -> set[str]:
    """The functions that an LLVM module calls, other than those of LLVM, Python and the C library."""
    names = {function.name for function in module.functions if function.is_declaration}
    return {name for name in names - {"memcpy", "memmove", "memset"} if not name.startswith(("llvm.", "Py"))}


@cache
def announce(folder: Path | None) -> bool:
    """Print, once, that functions are compiled. Returns whether the cache saves them."""
    reason = prepare_cache(folder)
    if reason:
        note(f"compiling for this CPU, which takes a few seconds at every start, because {reason}")
    else:
        note("compiling for this CPU; this takes a few seconds and happens only once")
    return reason is None


def prepare_cache(folder: Path | None) -> str | None:
    """Create the cache folder. Returns the reason why it cannot be used, or None."""
    if folder is None:
        return "the home folder of this user is unknown; set HOME"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_untrusted(folder):
        return reason
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written"


@cache
def function(module: CompiledModule, name: str, arguments: int = 1) -> Callable[..., int]:
    """A compiled function as a Python callable. arguments: their number. Raises CompileError."""
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * arguments)(address(module, name))


def addresses(*arrays: np.ndarray) -> list[int]:
    """The memory addresses of arrays, as arguments of a compiled function."""
    return [array.ctypes.data for array in arrays]
