"""What every part may import from the registry: identity tokens, ids, digests, names, settings and message types.

Holds no state and never imports sqlalchemy or litestar.
"""
