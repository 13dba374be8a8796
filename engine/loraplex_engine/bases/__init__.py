"""Base models on disk: fetched, converted, checked and named; no torch in here."""
