"""Files in and out: models, packed models, saved streams, checkpoints and modules of other frameworks."""
