"""Next tokens of requests: `Sampler` turns what they ask for into rows of the sampling ops, and reads the answers."""
