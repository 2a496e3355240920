"""Numbers about runs: lists, reports, and replays of single steps."""
