"""Plain data: runs, benchmarks and settings of methods. Nothing here needs torch."""
