"""The command line, the demo and the benchmarks. They import the library; the library does not import them."""
