"""The demonstration: three teams and the base answer one question in one batch; a client like any other."""
