"""Commands about benchmarks: what there is, whether one can run here, and what it takes from the network."""
