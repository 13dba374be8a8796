"""`loraplex up`: keys, database, base and child processes of one machine; serves no request itself."""
