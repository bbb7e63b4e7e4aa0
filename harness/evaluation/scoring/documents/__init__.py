"""Pages of OmniDocBench: blocks of an answer, matched to the blocks of a page and compared with them."""
