"""From stored results to curves, tables and pages."""
