"""Parts of a self-contained page, read by Python's HTML parser."""

from html.parser import HTMLParser

from folio.experiments.static_page import details, hash_source, page, table

HOSTILE = "<script>alert('x')</script> & \"é\""


class Elements(HTMLParser):
    """The text of each element, and the names of all elements."""

    def __init__(self, html: str):
        super().__init__()
        self.names, self.texts = [""], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)

    def handle_data(self, data):
        self.texts.append((self.names[-1], data))


def test_text_is_never_html():
    """A run's name is arbitrary."""
    html = page(HOSTILE, ["", table([HOSTILE], [[HOSTILE], ["2"]]), details(HOSTILE, "<p>inside</p>")], "", "draw()")
    elements = Elements(html)
    assert elements.names.count("script") == 1 and elements.names.count("tr") == 3
    assert elements.names[1] == "html" and ("script", "draw()") in elements.texts
    assert f"script-src {hash_source('draw()')}" in html and 'name="viewport"' in html.replace("'", '"')
    shown = {name: text for name, text in elements.texts if text == HOSTILE}
    assert shown.keys() == {"title", "h1", "th", "td", "summary"}
    assert ("p", "inside") in elements.texts
    assert "://" not in html  # no network requests
