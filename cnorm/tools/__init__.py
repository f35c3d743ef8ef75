"""The command line and the server. They import the library; the library does not import them."""
