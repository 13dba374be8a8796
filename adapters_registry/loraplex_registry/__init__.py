"""The registry: admits, stores, versions and aliases adapters."""
