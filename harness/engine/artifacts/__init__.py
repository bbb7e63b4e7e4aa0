"""What a calibration left behind, found and read."""
