"""Engine replicas: which exist, what they last said of themselves, which one a request goes to."""
