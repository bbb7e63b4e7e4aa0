"""Wrong and hostile input, made anew from a seed: `python -m tests.fuzz --seed 1 --cases 400`.

Each case is one command. It ends within its time, with exit code 0 and a right result, or with another code and exactly
one error line; no traceback, no key on a stream, and what it was not asked to remove is still there.
"""
