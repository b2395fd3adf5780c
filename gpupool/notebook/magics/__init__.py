"""`%gpupool`, `%%spmd` and `%spmd`: their lines, commands and completion. Runs on the client."""
