"""A language model as the judge of answers: what it is asked, and every verdict kept once it is there."""
