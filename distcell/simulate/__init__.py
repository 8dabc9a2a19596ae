"""All ranks in one process: the values that they compute, without any of them running."""
