"""Whether what Loraplex stands on is as it must be, and what to do where it is not."""
