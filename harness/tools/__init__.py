"""What a user runs once: calibration, conversion of checkpoints, checks of benchmarks and of the machine."""
