"""One run on one GPU: how fast the engine is. benchmarks/gpu/run.sh starts it."""
