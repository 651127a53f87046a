"""The tools of benchmarks/ that others rely on."""
