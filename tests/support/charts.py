"""The data of the charts in a page."""

import json
import re
from typing import Any


def charts_in(html: str) -> dict[str, dict[str, Any]]:
    """The charts by name."""
    scripts = re.findall(r"<script type='application/json'>(.*?)</script>", html, re.DOTALL)
    return {chart["name"]: chart for chart in map(json.loads, scripts)}


def lines_in(html: str, name: str = "curves") -> dict[str, dict[str, Any]]:
    """The lines of a chart by name. If several panels have a line of this name, the one in the first panel."""
    lines: dict[str, dict[str, Any]] = {}
    for group in charts_in(html)[name]["groups"]:
        for line in group["lines"]:
            lines.setdefault(line["name"], line)
    return lines
