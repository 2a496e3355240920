"""What HTTP and browsers see: the API, the viewer, and a model in one HTML file."""
