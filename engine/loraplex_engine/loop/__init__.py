"""The core process: messages in, steps, events out."""
