"""Backups of a one-machine platform: made while it runs, verified to the last byte, restored into an empty folder."""
