"""Find and read the results of calibrations."""
