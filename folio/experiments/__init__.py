"""Analysis of runs: lists, reports, and replays of single steps."""
