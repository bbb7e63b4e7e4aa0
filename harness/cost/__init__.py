"""What a run costs: time, arithmetic, memory, and the speed-up that the arithmetic allows."""
