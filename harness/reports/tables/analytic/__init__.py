"""Printed figures that follow from formulas, without a model."""
