"""Llama-like decoders: facts read from `config.json` (no torch) and the forward pass over paged keys and values."""
