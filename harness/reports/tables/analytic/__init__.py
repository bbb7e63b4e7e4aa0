"""Printed numbers that follow from formulas, without a model."""
