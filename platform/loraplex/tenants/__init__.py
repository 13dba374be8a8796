"""Tenants: who may be created, suspended, deleted. Knows nothing of keys, adapters or HTTP."""
