"""Calculations on formulas and simulated clocks; no model is loaded."""
