"""Types that cross the engine's door: messages between its processes, and its HTTP client. No torch, no litestar."""
