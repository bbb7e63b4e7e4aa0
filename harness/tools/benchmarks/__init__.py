"""Commands about benchmarks: list them, check them on this machine, and download their data."""
