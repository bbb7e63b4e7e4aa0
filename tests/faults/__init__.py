"""Writers that are killed at random moments, and what a store must hold afterwards."""
