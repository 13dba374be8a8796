"""The gateway's own tables and how they are reached; knows rows and transactions, no rules about them."""
