"""Pages of OmniDocBench: match the blocks of an answer to the blocks of a page, and compare them."""
