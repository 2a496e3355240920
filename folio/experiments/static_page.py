"""Parts of a self-contained HTML page: the document, its summary, tables, and collapsible sections."""

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from folio.base.files import atomic_write

FOLDER = Path(__file__).resolve().parent
BASE_STYLE = FOLDER / "page.css"  # rules and colors of all pages
COLORS = FOLDER / "colors.js"  # palettes of all pages
NUMBER = re.compile(r"(<[^>]*>)*([-+]?\.?\d|nan|inf)")  # the beginning of a cell with a number


def page(title: str, parts: Iterable[str], style: str, script: str, is_live: bool = False) -> str:
    """Return the page, with its title as a heading. parts: HTML. script: runs after the page is loaded.

    A content security policy prevents other scripts and all requests; is_live: all except those to its own server.
    """
    title = escape(title)
    base_style, colors = (path.read_text(encoding="utf-8") for path in (BASE_STYLE, COLORS))
    script = f'"use strict";\n{colors}\n{script}'
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src blob:; script-src {hash_source(script)}"
    policy += "; connect-src 'self'" if is_live else ""
    head = (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>{title}</title>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>\n{base_style}{style}</style>\n</head>\n<body>\n"
        f"<header id='top'><h1 class='document'>{title}</h1></header>\n<main class='document'>"
    )
    end = f"</main>\n<script>{script}</script>\n</body>\n</html>\n"
    return "\n".join([head, *filter(None, parts), end])


def write(path: Path, html: str) -> None:
    """Write a page. Names in it may not be UTF-8: such bytes become escapes. Raises OSError."""
    with atomic_write(path) as temporary:
        temporary.write_text(html, encoding="utf-8", errors="backslashreplace")


def hash_source(text: str) -> str:
    """Return the source expression by which a content security policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def summary(sentence: str) -> str:
    """Return the sentence at the top of a page."""
    return f"<p class='summary'>{escape(sentence)}</p>"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    return html_table([*map(escape, heads)], [[*map(escape, row)] for row in rows])


def html_table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells are HTML. Columns of numbers are aligned to the right."""
    are_numbers = [all(NUMBER.match(row[i]) for row in rows if row[i]) for i in range(len(heads))]
    kinds = ["" if is_number else " class='text'" for is_number in are_numbers]
    lines = [table_row("th", heads, kinds), *(table_row("td", row, kinds) for row in rows)]
    return f"<div class='scroll'><table>{''.join(lines)}</table></div>"


def table_row(tag: str, cells: list[str], kinds: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for cell, kind in zip(cells, kinds, strict=True))}</tr>"


def details(heading: str, content: str) -> str:
    """Return content that is shown when its heading is clicked."""
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"
