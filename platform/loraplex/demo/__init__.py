"""The demonstration: three teams, four answers to one question in one batch; a client of the platform like any other."""
