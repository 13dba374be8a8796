"""Tool calls: what is offered to the model, and how its calls are read from its text."""
