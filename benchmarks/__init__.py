"""Speed beside the peers, in one run: `python -m benchmarks step|collectives|plan|simulate`."""
