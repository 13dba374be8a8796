"""Requests and usage: rows committed before dispatch and at settle, recovery after a restart, sums."""
