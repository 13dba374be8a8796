"""How every part listens: the HTTP server's protocol with its bounds, and what all answers have. It knows no routes."""
