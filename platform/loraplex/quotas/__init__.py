"""How much may be called: quotas as rules, meters that count, reservations that are settled."""
