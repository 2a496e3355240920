"""What a run will take, before it starts and while it runs: memory, time, and the model that is best for them."""
