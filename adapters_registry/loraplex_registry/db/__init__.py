"""The registry's rows, how they are reached, and how the schema moves; knows no rules about adapters."""
