"""API keys: their text form, their verification, their rows. Knows nothing of HTTP."""
