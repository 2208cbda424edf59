"""One machine without Kubernetes: Ray, Serve and the manifests' models under one command."""
