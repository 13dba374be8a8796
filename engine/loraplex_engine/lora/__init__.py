"""Adapters on their way to the device: fetched, verified, packed, kept in host memory, bound to slots."""
