"""What the loop of train.py calls: how a run starts, its state, optimizers, schedule, guard, log, and forecasts."""
