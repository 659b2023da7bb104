"""Official benchmark harnesses, unmodified, against an endpoint of this project."""
