"""Parts of a self-contained HTML page: the document, tables, and collapsible sections."""

import base64
import hashlib
from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
h1, h2, h4, p, summary { overflow-wrap: anywhere }
table { border-collapse: collapse; margin: .5em 0 }
td, th { border: 1px solid #ccc; padding: .15em .6em; text-align: left }
th { background: #f3f3f3; font-weight: 600 }
pre { background: #f7f7f7; padding: .6em; white-space: pre-wrap }
.wide { overflow-x: auto }
summary { cursor: pointer; font-weight: 600; margin: .6em 0 }
"""


def page(title: str, parts: Iterable[str], style: str, script: str) -> str:
    """Return the page, with its title as a heading. parts: HTML. script: runs after the page is loaded.

    A content security policy prevents other scripts and all requests.
    """
    title = escape(title)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hash_source(script)}"
    head = (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n<title>{title}</title>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{STYLE}{style}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    )
    end = f"<script>{script}</script>\n</body>\n</html>\n"
    return "\n".join([head, *filter(None, parts), end])


def hash_source(text: str) -> str:
    """Return the source expression by which a content security policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"


def details(heading: str, content: str) -> str:
    """Return content that is shown when its heading is clicked."""
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"
