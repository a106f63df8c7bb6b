"""Benchmarks: programs that measure vtaps against plain vLLM, on the machine at hand."""
