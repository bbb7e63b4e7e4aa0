"""A language model as the judge of answers: its prompt, its requests, and the stored verdicts."""
