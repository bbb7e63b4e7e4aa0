"""For maintainers: benchmarks of the harness, training of the embedded models, writers of pages. Nothing imports it."""
