"""Functions, norms and cells, recognised by what they compute."""
