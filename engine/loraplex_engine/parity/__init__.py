"""Whether an adapter answers through its slot as its files say: golden prompts against base and merged deltas."""
