"""The report: the results of stores on one HTML page that needs no network."""
