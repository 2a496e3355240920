"""What was measured of models, as tables and lines."""

from collections.abc import Sequence
from typing import Any

from folio.evaluation.scores import Evaluation, PositionLoss


def format_results(models: Sequence[Evaluation], results: dict[str, Any]) -> str:
    """The table, what each model left out, the signatures of sacrebleu, and the tables of groups.

    results: what collect_results returns for the models.
    """
    table = format_positions(models) if "curves" in results else format_table(results["results"])
    lines = [table, *(line for model in models for line in left_out_lines(model))]
    lines += [f"{name}: sacrebleu {signature}" for name, signature in results.get("signatures", {}).items()]
    lines += [f"\n{grouped}" for grouped in format_groups(results.get("groups", []))]
    return "\n".join(lines)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per measure of each model, from Evaluation.rows."""
    lines = ["| model | on | measure | value | 95 % interval | over |", "|---|---|---|---|---|---|"]
    for row in rows:
        digits = 4 if abs(row["value"]) < 100 else 1
        interval = "unknown"
        if row["low"] is not None:
            interval = f"{row['low']:,.{digits}f} to {row['high']:,.{digits}f}"
        text = row["of"]
        if row.get("probes_matched"):
            text += f" ({row['probes_matched']} of {row['probes']} probes are in its training data)"
        cells = [row["run"], text, row["measure"], f"{row['value']:,.{digits}f}", interval]
        lines.append(f"| {' | '.join(cells)} | {row['n']:,} {row['over']} |")
    return "\n".join(lines)


def format_positions(models: Sequence[Evaluation]) -> str:
    """A table for each text, with a row per range of positions and a column per model.

    Models that split a text into different tokens get tables of their own, because a loss is per token.
    """
    tables: dict[tuple[str, str], list[tuple[Evaluation, PositionLoss]]] = {}
    for model in models:
        for losses in model.positions:
            tables.setdefault((losses.source, losses.windows), []).append((model, losses))
    return "\n\n".join(format_position_table(columns) for columns in tables.values())


def format_position_table(columns: Sequence[tuple[Evaluation, PositionLoss]]) -> str:
    """The losses of some models on the same windows."""
    _, first = columns[0]
    n_windows, context = first.counted.shape
    readings = [model.readings[first.source] for model, _ in columns]
    lines = [["tokens of context", *(model.run for model, _ in columns)]]
    lines.append(["block_size in training", *(f"{losses.block_size:,}" for _, losses in columns)])
    for rows in zip(*(losses.rows() for _, losses in columns), strict=True):
        lines.append([f"{rows[0]['first']:,} to {rows[0]['last']:,}", *map(format_loss, rows)])
    if any(reading.probes_matched for reading in readings):
        probes = [f"{r.probes_matched} of {r.probes}" if r.probes else "not searched" for r in readings]
        lines.append(["probes that are in its training data", *probes])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    title = f"{first.source}: loss in nats per token ± half the width of its 95 % interval, "
    title += f"over {n_windows:,} windows of {context + 1:,} tokens"
    return "\n".join([title, "", *(f"| {line} |" for line in padded)])


def format_loss(row: dict[str, Any]) -> str:
    """The value of a row with half the width of its interval."""
    if row["value"] is None:
        return "none"
    half_width = "unknown" if row["low"] is None else f"{(row['high'] - row['low']) / 2:.4f}"
    return f"{row['value']:.4f} ± {half_width}"


def format_groups(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the exact match by the fields of the pairs, for each model and source."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["run"], row["of"]), []).append(row)
    return [format_group_table(f"{run}, {source}", of_table) for (run, source), of_table in tables.items()]


def format_group_table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Groups by one field are rows; by two fields, the second one gives the columns."""
    fields = list(rows[0]["by"])
    first, *second = (list(dict.fromkeys(row["by"][field] for row in rows)) for field in fields)
    columns = second[0] if second else [rows[0]["measure"]]
    cells = {tuple(row["by"].values()): f"{format_loss(row)} ({row['pairs']:,})" for row in rows}
    lines = [f"{title}: exact match ± half the width of its 95 % interval (pairs)", ""]
    lines += [f"| {fields[0]} | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for value in first:
        keys = [(value, column) for column in columns] if second else [(value,)]
        lines.append(f"| {value} | {' | '.join(cells.get(key, 'none') for key in keys)} |")
    return "\n".join(lines)


def left_out_lines(model: Evaluation) -> list[str]:
    """For each text that was not read completely, a line about the characters that were left out."""
    lines = []
    for name, reading in model.readings.items():
        if reading.unknown:
            shown = [repr(character) for character, _ in reading.unknown.most_common(8)]
            more = ", ..." if len(reading.unknown) > len(shown) else ""
            lines.append(
                f"{model.run} left out {reading.left_out:,} of the {reading.characters:,} characters of {name} "
                f"({reading.left_out / reading.characters:.2%}), because they are not in its vocabulary: "
                f"{' '.join(shown)}{more}"
            )
    return lines
