"""Around one run: its key, its row, the loaded model, what people and logs get to see."""
