"""The sections of `bench/gpu_check.py`, and what they share."""
