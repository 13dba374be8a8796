"""Bases, adapters and versions: how they are found, shown, named, retired and deleted."""
