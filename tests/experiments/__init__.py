"""The experiments: data, methods, results, restarts, sweeps."""
