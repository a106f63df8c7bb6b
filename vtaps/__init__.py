"""vtaps: YAML intervention specs, compiled to reviewable Python that runs inside vLLM's workers."""

__version__ = "0.1.0"
