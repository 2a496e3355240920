"""Parts of a page that is one HTML file and needs no network: its frame, tables, and plotly's figures."""

from collections.abc import Iterable
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .5em 0 }
td, th { border: 1px solid #ccc; padding: .15em .6em; text-align: left }
th { background: #f3f3f3; font-weight: 600 }
pre { background: #f7f7f7; padding: .6em; white-space: pre-wrap }
.wide { overflow-x: auto }
summary { cursor: pointer; font-weight: 600; margin: .6em 0 }
"""
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def page(title: str, parts: Iterable[str]) -> str:
    """The page, with its title as a heading. parts: HTML; empty ones are left out."""
    title = escape(title)
    head = f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>\n<h1>{title}</h1>"
    return "\n".join([head, *filter(None, parts)])


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"


def details(heading: str, content: str) -> str:
    """Content that is shown when its heading is clicked."""
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"


def figures(*of_plotly: Any) -> str:
    """plotly's figures; the first one with its script, so there is one call per page."""
    return "\n".join(
        figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(of_plotly)
    )
