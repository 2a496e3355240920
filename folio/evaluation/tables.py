"""Format evaluation results as tables and lines."""

from collections.abc import Sequence
from typing import Any

from folio.base.number_format import counted
from folio.base.terminal import table, wrap
from folio.evaluation.scores import MIN_EFFECTIVE, PREPARED_AGAIN, Evaluation, PositionLoss


def format_results(models: Sequence[Evaluation], results: dict[str, Any], width: int | None = None) -> str:
    """Format the table, limits of its intervals, characters that models left out, sacrebleu's signatures, and groups.

    results: returned by collect_results for the models. width: of the terminal, in which lines and cells wrap; None:
    Markdown.
    """
    main_table = format_positions(models, width) if "curves" in results else format_table(results["results"], width)
    lines = [*dict.fromkeys(line for model in models for line in model.warnings())]  # models share texts
    lines += [line for model in models for line in left_out_lines(model)]
    lines += [f"{name}: sacrebleu {signature}" for name, signature in results.get("signatures", {}).items()]
    wrapped = lines if width is None else [wrap(line, width) for line in lines]
    groups = [f"\n{grouped}" for grouped in format_groups(results.get("groups", []), width)]
    return "\n".join([main_table, *wrapped, *groups])


def format_table(rows: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Format a table with a line per measure of each model. rows: from Evaluation.rows. width: as in format_results."""
    head, lines = ["model", "data", "measure", "value", "95 % interval", "samples"], []
    for row in rows:
        digits = 4 if abs(row["value"]) < 100 else 1
        interval = "unknown"
        if row["low"] is not None:
            interval = f"{row['low']:,.{digits}f} to {row['high']:,.{digits}f}"
        text = row["of"]
        if row.get("probes_matched"):
            text += f" ({row['probes_matched']} of {row['probes']} probes are in its training data)"
        if row.get("characters_in_training"):
            of = f"{row['characters_in_training']:,} of {row['characters_searched']:,} characters"
            text += f" ({of} are in its training data)"
        if row.get("prepared_again"):
            text += f" ({PREPARED_AGAIN})"
        effective = row.get("effective", row["n"])
        like = f" (like {effective:,.1f})" if effective < MIN_EFFECTIVE * row["n"] else ""
        value, samples = f"{row['value']:,.{digits}f}", f"{row['n']:,} {row['over']}{like}"
        lines.append([row["run"], text, row["measure"], value, interval, samples])
    return markdown(head, lines) if width is None else without_common(head, lines, width)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without padding."""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


def without_common(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table for a terminal, above which are the model and the data if they are the same in all rows."""
    common = [len({row[i] for row in rows}) == 1 and name in ("model", "data") for i, name in enumerate(head)]
    lines = [wrap(f"{name}: {rows[0][i]}", width) for i, name in enumerate(head) if common[i]]
    kept = [[cell for cell, is_common in zip(row, common, strict=True) if not is_common] for row in (head, *rows)]
    return "\n".join([*lines, table(kept[0], kept[1:], width)])


def format_positions(models: Sequence[Evaluation], width: int | None = None) -> str:
    """Format a table for each text, with a row per range of positions and a column per model.

    Models that tokenize a text differently are in separate tables, because the loss is per token.
    """
    tables: dict[tuple[str, str], list[tuple[Evaluation, PositionLoss]]] = {}
    for model in models:
        for losses in model.positions:
            tables.setdefault((losses.source, losses.windows), []).append((model, losses))
    return "\n\n".join(format_position_table(columns, width) for columns in tables.values())


def format_position_table(columns: Sequence[tuple[Evaluation, PositionLoss]], width: int | None = None) -> str:
    """Format the losses of models on the same windows."""
    _, first = columns[0]
    n_windows, context = first.counted.shape
    coverages = [model.coverage[first.source] for model, _ in columns]
    lines = [["tokens of context", *(model.run for model, _ in columns)]]
    lines.append(["block_size in training", *(f"{losses.block_size:,}" for _, losses in columns)])
    for rows in zip(*(losses.rows() for _, losses in columns), strict=True):
        lines.append([f"{rows[0]['first']:,} to {rows[0]['last']:,}", *map(format_loss, rows)])
    if any(coverage.probes_matched for coverage in coverages):
        probes = [f"{c.probes_matched} of {c.probes}" if c.probes else "not searched" for c in coverages]
        lines.append(["probes that are in its training data", *probes])
    if any(coverage.quoted and coverage.quoted[0] for coverage in coverages):
        quoted = ["{:,} of {:,}".format(*c.quoted) if c.quoted else "not searched" for c in coverages]
        lines.append(["characters that are in its training data", *quoted])
    if any(coverage.prepared_again for coverage in coverages):
        lines.append([PREPARED_AGAIN, *("yes" if coverage.prepared_again else "no" for coverage in coverages)])
    title = f"{first.source}: loss in nats per token ± half the width of its 95 % interval, "
    title += f"over {counted(n_windows, 'window')} of {context + 1:,} tokens"
    title = title if width is None else wrap(title, width)
    return f"{title}\n\n{table(lines[0], lines[1:], width)}"


def format_loss(row: dict[str, Any]) -> str:
    """Format the value of a row, and half the width of its interval."""
    if row["value"] is None:
        return "none"
    half_width = "unknown" if row["low"] is None else f"{(row['high'] - row['low']) / 2:.4f}"
    return f"{row['value']:.4f} ± {half_width}"


def format_groups(rows: Sequence[dict[str, Any]], width: int | None = None) -> list[str]:
    """Format a table of the exact match by the fields of the pairs, for each model and source."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["run"], row["of"]), []).append(row)
    return [format_group_table(f"{run}, {source}", group, width) for (run, source), group in tables.items()]


def format_group_table(title: str, rows: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Format groups: the first field selects the row and the second, if any, the column."""
    fields = list(rows[0]["by"])
    first, *second = (list(dict.fromkeys(row["by"][field] for row in rows)) for field in fields)
    columns = second[0] if second else [rows[0]["measure"]]
    cells = {tuple(row["by"].values()): f"{format_loss(row)} ({row['pairs']:,})" for row in rows}
    title += ": exact match ± half the width of its 95 % interval (pairs)"
    head, lines = [fields[0], *columns], []
    for value in first:
        keys = [(value, column) for column in columns] if second else [(value,)]
        lines.append([str(value), *(cells.get(key, "none") for key in keys)])
    if width is None:
        return f"{title}\n\n{markdown(head, lines)}"
    return f"{wrap(title, width)}\n\n{table(head, lines, width)}"


def left_out_lines(model: Evaluation) -> list[str]:
    """Return a line about the characters that were left out, for each text with any."""
    lines = []
    for name, coverage in model.coverage.items():
        if coverage.unknown:
            shown = [repr(character) for character, _ in coverage.unknown.most_common(8)]
            more = ", ..." if len(coverage.unknown) > len(shown) else ""
            lines.append(
                f"{model.run} left out {coverage.left_out:,} of the {counted(coverage.characters, 'character')} of "
                f"{name} ({coverage.left_out / coverage.characters:.2%}), because they are not in its vocabulary: "
                f"{' '.join(shown)}{more}"
            )
    return lines
