"""Adapter slots: which digest sits where, and who needs it. No torch."""
