"""Run folders and checkpoints, and the checkpoint formats of other programs."""
