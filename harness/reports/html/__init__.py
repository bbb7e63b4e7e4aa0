"""The report: all that a store holds on one page of HTML that needs no network."""
