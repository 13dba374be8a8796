"""The fields of request bodies: each is honoured, has a value that changes nothing, or is refused by name."""
