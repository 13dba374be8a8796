"""The gateway: the only public door, and the loraplex command."""
