"""The public door: authenticate, resolve `model=`, choose a replica, relay, settle; and the management routes."""
