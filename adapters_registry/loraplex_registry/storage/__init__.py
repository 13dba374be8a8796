"""Where the bytes of artifacts lie, by digest; knows no names and no rows."""
