"""The `loraplex` command; each module holds one group of commands and imports what it needs when it runs."""
