"""How an adapter comes in: received into staging, checked in a process of its own, stored, published."""
