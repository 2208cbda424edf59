"""The `flexinfer` command; one file a subcommand."""
