"""What to change, and why: rules over facts that were measured, each finding with its figures and the exact flag."""
