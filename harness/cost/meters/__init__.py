"""What an answer costs beside its time, one file a meter: harness/cost/meter.py describes how to add one."""
