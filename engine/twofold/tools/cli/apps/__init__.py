"""Commands that start the programs beside the package: the dashboard and the load test."""
