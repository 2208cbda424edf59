"""The Ray Serve side: engines as replicas, the OpenAI gateway, and the autoscaling policies."""
