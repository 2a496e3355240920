"""Settings, files, downloads, worker processes, terminal output, and random numbers. Needs no torch."""
