"""The page of the ledger: what all ideas together show, a table of them, and their intervals."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from folio import UserError
from folio.experiments import static_page
from folio.experiments.charts import page_with_charts
from folio.experiments.ideas.ledger import HEADS, best_lines, read, rows, summary


def write_page(root: Path) -> Path:
    """Write the page of the ledger in a folder. Returns its path. Raises UserError."""
    path = root / "ledger.html"
    try:
        static_page.write(path, ledger_page(read(root)))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return path


def ledger_page(entries: Sequence[dict[str, Any]]) -> str:
    """Return the page as HTML."""
    parts = [static_page.summary(summary(entries)), *(f"<p>{escape(line)}</p>" for line in best_lines(entries))]
    parts.append(static_page.table(list(HEADS), rows(entries)))
    parts.append(
        "<p>B - A: validation loss of the idea minus that without it, in nats per token unless noted; the interval is "
        "valid however often one looks. Better is the 5 % verdict of one experiment. Kept is stricter: it bounds the "
        "share of luck among all kept ideas.</p>"
    )
    return page_with_charts("Folio: ideas", parts)
