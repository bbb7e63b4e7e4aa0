"""Costs of an answer other than time, one file a meter: harness/cost/meter.py describes how to add one."""
