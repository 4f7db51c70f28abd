"""The project's own benchmarks, one sub-command of scripts/bench each. docs/benchmarks.md says what they mean."""
