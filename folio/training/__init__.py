"""The modules behind train.py's loop: start, state, session, optimizers, schedule, guard, logs, and forecasts."""
