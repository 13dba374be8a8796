"""What gateways see of requests and engines, in pieces of ten seconds that merge: recorded, kept two hours, read."""
