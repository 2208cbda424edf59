"""FlexInfer: a serving orchestrator for large language models on Ray Serve."""

__version__ = "0.1.0"
