"""Lower: canonical nodes to what a target runs best."""
