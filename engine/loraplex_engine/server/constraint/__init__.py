"""What the text of an answer must match: from fields of a request to a grammar that the core takes."""
