"""The only place that touches vLLM internals."""
