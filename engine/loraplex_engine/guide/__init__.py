"""Grammars that answers must match: which tokens may come next, found in threads while the model runs."""
