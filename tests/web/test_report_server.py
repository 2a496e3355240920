"""folio/web/report_server.py: when the page is rendered, and what is sent. tests/tools/test_report.py has a browser."""

import http.client
from contextlib import closing
from pathlib import Path

from folio import UserError
from folio.web.report_server import LiveReport, make_app
from tests.support.servers import serving_app


def test_the_page_is_rendered_again_only_after_a_run_has_changed(tmp_path):
    folders, rendered = [tmp_path], []
    report = LiveReport(lambda: folders, lambda: rendered.append(1) or f"page {len(rendered)}")

    def page() -> str:
        return report.page()[0]

    assert page() == page() == "page 1"
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert page() == page() == "page 2"
    (tmp_path / "other").write_text("")
    assert page() == "page 2"
    folders.append(tmp_path / "new")
    assert page() == "page 3"


def test_an_unchanged_page_is_not_sent_again(tmp_path):
    content = ["<p>\\udce9</p>"]
    folders: list[Path] = [tmp_path]
    report = LiveReport(lambda: folders, lambda: content[0])
    with serving_app(lambda hosts: make_app(report, hosts)) as port:

        def get(headers: dict[str, str]) -> tuple[int, bytes, str]:
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("GET", "/", headers=headers)
                response = connection.getresponse()
                return response.status, response.read(), response.getheader("etag")

        status, body, etag = get({})
        assert (status, body) == (200, content[0].encode())
        assert get({"if-none-match": etag}) == (304, b"", etag)
        content[0] = "new"
        (tmp_path / "samples.jsonl").write_text("{}")
        assert get({"if-none-match": etag})[:2] == (200, b"new")
        assert get({"Host": "example.com"})[0] == 403

        def fail() -> str:
            raise UserError("no runs")

        report.render = fail
        folders.clear()
        assert get({})[:2] == (400, b'{"error": "no runs"}')
