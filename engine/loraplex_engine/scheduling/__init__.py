"""Who runs next: admission, catching up, preemption. No torch."""
