"""From text to token shards to the windows of a step. Needs no torch."""
