"""One engine process: its command line, environment and GPUs, its readiness, failure and end."""
