"""What the management API answers, as both of its ends have it: plain data that gateway and command line share."""
