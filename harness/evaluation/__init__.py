"""The bridge to lmms-eval: tasks in, answers through the engine, metrics and telemetry out."""
