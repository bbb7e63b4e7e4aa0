"""Protocols of evaluation papers over stored results: tables with intervals, and figures."""
