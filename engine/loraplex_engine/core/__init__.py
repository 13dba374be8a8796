"""Plain data that the host side and the device side share: requests, plans, results. No torch at run time."""
