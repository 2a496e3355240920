"""Numbers in tables and messages."""

from folio.base.number_format import counted, format_seconds, format_value


def test_counts_and_values():
    """Messages said "1 minutes", and a sweep showed 0.99 and 0.9900001 as the same number."""
    assert [counted(n, "minute") for n in (1, 1.0, 0.5, 2)] == ["1 minute", "1 minute", "0.5 minutes", "2 minutes"]
    assert counted(1, "batch", "batches") == "1 batch" and counted(3000, "batch", "batches") == "3,000 batches"
    values = "0.99, 0.9900001, 0.001, 0.3, 0.3333, 3"
    assert ", ".join(map(format_value, (0.99, 0.9900001, 1e-3, 0.1 + 0.2, 1 / 3, 3))) == values
    seconds = "8.2 s, 59.9 s, 2 min 20 s, 1 h 00 min, 1,200 h 05 min"
    assert ", ".join(map(format_seconds, (8.24, 59.9, 140, 3599.6, 3600 * 1200 + 300))) == seconds
