"""Ideas: a change of the code against the code without it, pair after pair, until the answer is known."""
