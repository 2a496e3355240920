"""Training steps that are captured as CUDA graphs."""
