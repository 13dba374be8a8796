"""What each part is told, where that came from, and what of it cannot hold."""
