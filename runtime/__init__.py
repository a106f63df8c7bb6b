"""The block at work inside vLLM: engines, row table, harvest, results."""
