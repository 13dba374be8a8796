"""Escalations: the exceptions by which one adapter becomes a full fine-tune, with evidence, an owner and a date."""
