"""`loraplex bench`: load against any OpenAI-compatible server, and what its clients saw, with how sure that is.

A leaf beside `cli`: knows HTTP and the OpenAI stream, nothing of the platform behind it.
"""
