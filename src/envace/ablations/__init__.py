"""Every variant of the method in the same budget, on the embedded world."""
