"""The audit trail: reads the event tables of all parts as one list."""
