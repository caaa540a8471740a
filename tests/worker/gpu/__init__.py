"""The worker on a GPU, on machines without one."""
