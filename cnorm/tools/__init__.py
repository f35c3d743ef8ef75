"""What stands on the library and is not part of it: the command line, the demo, the benchmarks. Nothing imports it."""
